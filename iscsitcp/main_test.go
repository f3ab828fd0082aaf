package iscsitcp

import (
	"os"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	before := openFiles()
	code := m.Run()
	if code == 0 {
		if err := goleak.Find(); err != nil {
			os.Stderr.WriteString(err.Error() + "\n")
			code = 1
		}
		if after := openFiles(); after > before+2 { // the runtime's own poller may appear
			os.Stderr.WriteString("descriptors were left open\n")
			code = 1
		}
	}
	os.Exit(code)
}

func openFiles() int {
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return 0
	}
	return len(list)
}
