package targets

import (
	"fmt"
	"os"
	"path/filepath"
)

// Resize changes the size of a FileIO unit, bytes, while the target runs. The kernel's target tells nobody: initiators find out when they ask.
func (l *LIO) Resize(lun int, u Unit, size int64) error {
	if u.Kind != FileIO {
		return fmt.Errorf("lio: lun %d: a unit of kind %s keeps its size", lun, u.Kind)
	}
	if err := os.Truncate(u.Path, size); err != nil {
		return err
	}
	return write(filepath.Join(l.luns[lun], "control"), fmt.Sprintf("fd_dev_size=%d", size))
}
