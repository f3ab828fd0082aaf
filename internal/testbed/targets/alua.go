package targets

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
)

// Access states of a port group for a unit, as the kernel's target takes them (SPC-4).
const (
	AccessOptimized    = 0
	AccessNonOptimized = 1
	AccessStandby      = 2
	AccessUnavailable  = 3
)

// AddGroup adds a second portal group (TPGT 2) with the same units and a portal of its own, as a second controller of an array is. Each of the two gets
// an ALUA group for each unit, with the number of the portal group.
func (l *LIO) AddGroup(p Portal) error {
	if err := l.addGroup(p); err != nil {
		return fmt.Errorf("lio: portal group 2 of %s: %w", l.cfg.Name, err)
	}
	return nil
}

func (l *LIO) addGroup(p Portal) error {
	l.second = filepath.Join(l.iqn, "tpgt_2")
	if err := os.Mkdir(l.second, 0o755); err != nil {
		return err
	}
	for k, v := range map[string]string{"authentication": "0", "generate_node_acls": "1", "cache_dynamic_acls": "1", "demo_mode_write_protect": "0"} {
		if err := write(filepath.Join(l.second, "attrib", k), v); err != nil {
			return err
		}
	}
	for lun, core := range l.luns {
		dir := filepath.Join(l.second, "lun", "lun_"+strconv.Itoa(lun))
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
		if err := os.Symlink(core, filepath.Join(dir, "backend")); err != nil {
			return err
		}
		for i, tpg := range []string{l.tpg, l.second} {
			group := aluaGroup(core, i+1)
			if err := os.Mkdir(group, 0o755); err != nil {
				return err
			}
			// Implicit only: the target changes the states. No delays.
			for _, x := range [][2]string{{"tg_pt_gp_id", strconv.Itoa(i + 1)}, {"alua_access_type", "1"}, {"trans_delay_msecs", "0"}, {"nonop_delay_msecs", "0"}} {
				if err := write(filepath.Join(group, x[0]), x[1]); err != nil {
					return err
				}
			}
			if err := write(filepath.Join(tpg, "lun", "lun_"+strconv.Itoa(lun), "alua_tg_pt_gp"), filepath.Base(group)); err != nil {
				return err
			}
		}
	}
	dir := filepath.Join(l.second, "np", p.Addr.String())
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	if p.ISER {
		if err := write(filepath.Join(dir, "iser"), "1"); err != nil {
			return err
		}
	}
	return write(filepath.Join(l.second, "enable"), "1")
}

func aluaGroup(core string, tpgt int) string {
	return filepath.Join(core, "alua", "group_"+strconv.Itoa(tpgt))
}

// SetAccess changes the access state of a unit through a portal group, 1 or 2. Initiators hear of it by a unit attention.
func (l *LIO) SetAccess(lun, tpgt, state int) error {
	return write(filepath.Join(aluaGroup(l.luns[lun], tpgt), "alua_access_state"), strconv.Itoa(state))
}

// closeGroup removes the second portal group.
func (l *LIO) closeGroup() error {
	if l.second == "" {
		return nil
	}
	if _, err := os.Stat(l.second); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	errs := []error{write(filepath.Join(l.second, "enable"), "0")}
	wires, _ := filepath.Glob(filepath.Join(l.second, "np", "*"))
	for _, w := range wires {
		errs = append(errs, remove(w))
	}
	for lun, core := range l.luns {
		for i, tpg := range []string{l.tpg, l.second} {
			dir := filepath.Join(tpg, "lun", "lun_"+strconv.Itoa(lun))
			errs = append(errs, write(filepath.Join(dir, "alua_tg_pt_gp"), "default_tg_pt_gp"))
			if i == 1 {
				errs = append(errs, remove(filepath.Join(dir, "backend")), remove(dir))
			}
			errs = append(errs, remove(aluaGroup(core, i+1)))
		}
	}
	return errors.Join(append(errs, remove(l.second))...)
}
