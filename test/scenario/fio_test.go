package scenario

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// fioJob is one job of a fio run.
type fioJob struct {
	name    string
	file    string
	options []string
}

// fioVerify writes a device from end to end with checksums, in blocks of 512 bytes to 1 MiB mixed, four jobs with 32 requests each in flight,
// every job on its own part of the device, and reads everything back.
func fioVerify(name, device string, size uint64) []fioJob {
	const jobs = 4
	part := size / jobs &^ (1<<20 - 1)
	var list []fioJob
	for i := range jobs {
		list = append(list, fioJob{
			name: fmt.Sprintf("%s-%d", name, i),
			file: device,
			options: []string{
				"rw=randrw", "bsrange=512-1m", "blockalign=512", "iodepth=32", "ioengine=io_uring", "direct=1",
				fmt.Sprintf("offset=%d", uint64(i)*part), fmt.Sprintf("size=%d", part),
				"verify=crc32c", "verify_fatal=1", "serialize_overlap=1", "randrepeat=1", fmt.Sprintf("randseed=%d", 100+i),
			},
		})
	}
	return list
}

// fioOutcome is what a run reports.
type fioOutcome struct {
	Jobs []struct {
		Name  string `json:"jobname"`
		Error int    `json:"error"`
		Read  fioSide
		Write fioSide
	} `json:"jobs"`
}

type fioSide struct {
	Bytes uint64  `json:"io_bytes"`
	IOPS  float64 `json:"iops"`
	Total uint64  `json:"total_ios"`
}

// startFio starts jobs. It makes sure that their files are block devices: fio would write regular files otherwise and be content.
func startFio(t testing.TB, jobs []fioJob, global ...string) (wait func() fioOutcome) {
	t.Helper()
	var b strings.Builder
	b.WriteString("[global]\nthread=1\n" + strings.Join(global, "\n") + "\n")
	for _, j := range jobs {
		info, err := os.Stat(j.file)
		if err != nil || info.Mode()&os.ModeDevice == 0 {
			t.Fatalf("fio job %s: %s is not a block device (%v)", j.name, j.file, err)
		}
		fmt.Fprintf(&b, "[%s]\nfilename=%s\n%s\n", j.name, j.file, strings.Join(j.options, "\n"))
	}
	file := filepath.Join(t.TempDir(), "job.fio")
	if err := os.WriteFile(file, []byte(b.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	out := file + ".json"
	cmd := exec.Command("fio", "--output-format=json", "--output="+out, file)
	cmd.Dir = filepath.Dir(file)
	var messages strings.Builder
	cmd.Stdout, cmd.Stderr = &messages, &messages
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return func() fioOutcome {
		t.Helper()
		err := cmd.Wait()
		text, _ := os.ReadFile(out)
		if err != nil {
			t.Fatalf("fio: %v\n%s\n%.3000s", err, messages.String(), text)
		}
		// fio may print warnings before the JSON.
		if i := strings.IndexByte(string(text), '{'); i > 0 {
			text = text[i:]
		}
		var o fioOutcome
		if err := json.Unmarshal(text, &o); err != nil {
			t.Fatalf("fio's report: %v\n%.500s", err, text)
		}
		if len(o.Jobs) == 0 {
			t.Fatal("fio reports no job")
		}
		for _, j := range o.Jobs {
			if j.Error != 0 {
				t.Fatalf("fio job %s: error %d\n%s", j.Name, j.Error, messages.String())
			}
		}
		return o
	}
}

// fio runs jobs to their end.
func fio(t testing.TB, jobs []fioJob, global ...string) fioOutcome {
	t.Helper()
	return startFio(t, jobs, global...)()
}
