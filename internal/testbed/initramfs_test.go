package testbed

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestCPIO lets cpio(1), where it is installed, read what we write; the bytes of one entry are checked everywhere.
func TestCPIO(t *testing.T) {
	var b bytes.Buffer
	w := newCPIO(&b)
	w.dir("d")
	w.file("d/f", 0o755, []byte("hello"))
	if err := w.close(); err != nil {
		t.Fatal(err)
	}
	const entry = "070701" + "00000002" + "000081ed" + "00000000" + "00000000" + "00000001" + "00000000" + "00000005" +
		"00000000" + "00000000" + "00000000" + "00000000" + "00000004" + "00000000" + "d/f\x00\x00\x00hello\x00\x00\x00"
	if !strings.Contains(b.String(), entry) {
		t.Errorf("no entry\n%q in\n%q", entry, b.String())
	}
	if b.Len()%4 != 0 {
		t.Errorf("the archive has %d bytes, not a multiple of 4", b.Len())
	}
	if _, err := exec.LookPath("cpio"); err != nil {
		t.Log("not read back: ", err)
		return
	}
	cmd := exec.Command("cpio", "-it", "--quiet")
	cmd.Stdin = &b
	out, err := cmd.CombinedOutput()
	if err != nil || string(out) != "d\nd/f\n" {
		t.Errorf("cpio reads %q, %v", out, err)
	}
}

func TestReadModule(t *testing.T) {
	dir := t.TempDir()
	plain := filepath.Join(dir, "a.ko")
	if err := os.WriteFile(plain, []byte("ELF"), 0o644); err != nil {
		t.Fatal(err)
	}
	if b, err := readModule(plain); string(b) != "ELF" || err != nil {
		t.Errorf("got %q, %v", b, err)
	}
	packed := writeIndex(t, "ELF, packed")
	if b, err := readModule(packed); string(b) != "ELF, packed" || err != nil {
		t.Errorf("got %q, %v", b, err)
	}
	broken := filepath.Join(dir, "b.ko.xz")
	if err := os.WriteFile(broken, []byte("no xz"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := readModule(broken); err == nil {
		t.Error("a broken module was read")
	}
}
