package scenario

import (
	"path/filepath"
	"strings"
	"testing"

	"iserd.org/iserd/internal/testbed/targets"
)

// Huge pages are used up: memory of them cannot be registered, with the reason, the rest goes on, and it can be when there are some.
func TestFaultHugePages(t *testing.T) {
	g := newTarget(t, kinds[0], []targets.Unit{{Kind: targets.Ramdisk, Size: 16 * mib}})
	g.login(t)
	dir := hugePages(t, 2)
	path := memoryFile(t, filepath.Join(dir, "pool"), sharedJobMemory)
	refused := func(t *testing.T) {
		r := run(t, "iserctl", "buffer", "add", path)
		if r.code == 0 || !strings.Contains(r.stderr, "vm.nr_hugepages") {
			t.Errorf("exit status %d: %s", r.code, r.stderr)
		}
		oneLine(t, r)
	}
	g.ride(t, refused)
	before := status(t).DataPlane
	refused(t)
	onlyArena(t)
	if now := status(t).DataPlane; !sameObjects(before, now) {
		t.Errorf("before %+v, now %+v", before, now)
	}
	setHugePages(t, 8)
	addBuffer(t, path)
	fio(t, []fioJob{sharedJob("fio", devices(t, g.name)[0].Path, "mmaphuge:"+path, 1)})
	g.logout(t)
}
