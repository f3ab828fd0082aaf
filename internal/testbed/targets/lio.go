package targets

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// configfs is where the kernel's target is set up.
const configfs = "/sys/kernel/config/target"

// LIOConfig describes a target of the kernel.
type LIOConfig struct {
	Name    string   // iSCSI name
	Portals []Portal // at least one
	Units   []Unit   // unit i has LUN i

	// Initiators are the names that may log in. Empty admits everyone, as the kernel's demonstration mode does.
	Initiators []string
	ReadOnly   bool // all units refuse writes

	CHAP *CHAP // whom it admits; everyone that the rest lets in when nil

	Attributes map[string]string // of the portal group, by the names in its folder attrib; they override what demonstration mode sets
	Parameters map[string]string // text keys the target offers, by the names in its folder param, as in MaxBurstLength
}

// LIO is a target of the kernel. Its methods are for one goroutine.
type LIO struct {
	cfg    LIOConfig
	iqn    string         // folder of the target
	tpg    string         // folder of its portal group
	second string         // of the second one, "" if there is none: see AddGroup
	luns   map[int]string // folder of the back end, by LUN
	wires  []string       // folders of portals
}

// NewLIO makes a target and opens it for logins. What was made is removed again when a step fails, and by Close.
//
// Errors name the file of configfs and what the kernel said. It needs root, and the modules iscsi_target_mod, target_core_mod,
// target_core_file or target_core_iblock by kind, and ib_isert for iSER.
func NewLIO(cfg LIOConfig) (*LIO, error) {
	l := &LIO{cfg: cfg, iqn: filepath.Join(configfs, "iscsi", cfg.Name), luns: map[int]string{}}
	l.tpg = filepath.Join(l.iqn, "tpgt_1")
	if _, err := os.Stat(l.iqn); err == nil {
		return nil, fmt.Errorf("lio: target %s exists already", cfg.Name)
	}
	if err := l.setUp(); err != nil {
		err = fmt.Errorf("lio: make target %s: %w", cfg.Name, err)
		if cerr := l.Close(); cerr != nil {
			err = fmt.Errorf("%w (and then: %v)", err, cerr)
		}
		return nil, err
	}
	return l, nil
}

// setUp makes the target and opens it.
func (l *LIO) setUp() error {
	// The folder "iscsi" is made by hand: that loads the fabric module.
	for _, d := range []string{filepath.Join(configfs, "iscsi"), l.iqn, l.tpg} {
		if err := os.Mkdir(d, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
	}
	attributes := map[string]string{"authentication": "0"}
	if len(l.cfg.Initiators) == 0 {
		attributes["generate_node_acls"], attributes["cache_dynamic_acls"] = "1", "1"
		attributes["demo_mode_write_protect"] = boolDigit(l.cfg.ReadOnly)
	}
	if l.cfg.CHAP != nil {
		attributes["authentication"] = "1"
	}
	maps.Copy(attributes, l.cfg.Attributes)
	if err := l.writeAll("attrib", attributes); err != nil {
		return err
	}
	if err := l.writeAll("param", l.cfg.Parameters); err != nil {
		return err
	}
	for i, u := range l.cfg.Units {
		if err := l.AddUnit(i, u); err != nil {
			return err
		}
	}
	for _, p := range l.cfg.Portals {
		if err := l.addPortal(p); err != nil {
			return err
		}
	}
	for _, name := range l.cfg.Initiators {
		if err := os.Mkdir(filepath.Join(l.tpg, "acls", name), 0o755); err != nil {
			return err
		}
		for lun := range l.luns {
			if err := l.mapUnit(name, lun); err != nil {
				return err
			}
		}
	}
	if l.cfg.CHAP != nil {
		if err := l.SetCHAP(l.cfg.CHAP); err != nil {
			return err
		}
	}
	return l.SetEnabled(true)
}

// SetCHAP changes whom the target admits, from the next login on. The target was made with CHAP.
func (l *LIO) SetCHAP(c *CHAP) error {
	dirs := []string{filepath.Join(l.tpg, "auth")}
	for _, name := range l.cfg.Initiators {
		dirs = append(dirs, filepath.Join(l.tpg, "acls", name, "auth"))
	}
	for _, dir := range dirs {
		if err := writeCHAP(dir, c); err != nil {
			return err
		}
	}
	return nil
}

// SetDiscoveryCHAP makes discovery sessions with the kernel's target, at every portal, prove themselves; nil ends that.
func SetDiscoveryCHAP(c *CHAP) error {
	dir := filepath.Join(configfs, "iscsi", "discovery_auth")
	if c == nil {
		return write(filepath.Join(dir, "enforce_discovery_auth"), "0")
	}
	if err := writeCHAP(dir, c); err != nil {
		return err
	}
	return write(filepath.Join(dir, "enforce_discovery_auth"), "1")
}

// writeCHAP sets names and secrets. The word NULL takes one away.
func writeCHAP(dir string, c *CHAP) error {
	for file, value := range map[string]string{"userid": c.User, "password": c.Secret, "userid_mutual": c.TargetUser, "password_mutual": c.TargetSecret} {
		if value == "" {
			value = "NULL"
		}
		if err := write(filepath.Join(dir, file), value); err != nil {
			return err
		}
	}
	return nil
}

// Name returns the target's iSCSI name.
func (l *LIO) Name() string { return l.cfg.Name }

// LUNs returns how many units the target had from the beginning: they have the numbers 0 to LUNs-1.
func (l *LIO) LUNs() int { return len(l.cfg.Units) }

// SetEnabled opens the target for logins, or shuts it: sessions are ended by the target and new ones refused.
func (l *LIO) SetEnabled(on bool) error { return write(filepath.Join(l.tpg, "enable"), boolDigit(on)) }

// SetAttribute changes an attribute of the portal group, by the names in its folder attrib. Those of the login count from the next one on.
func (l *LIO) SetAttribute(name, value string) error {
	return write(filepath.Join(l.tpg, "attrib", name), value)
}

// Sessions returns how many sessions the target has. It falls a moment after an initiator has gone.
func (l *LIO) Sessions() (int, error) {
	return readInt(filepath.Join(l.iqn, "fabric_statistics", "iscsi_instance", "sessions"))
}

// Logins returns how many logins the target has accepted.
func (l *LIO) Logins() (int, error) {
	return readInt(filepath.Join(l.iqn, "fabric_statistics", "iscsi_login_stats", "accepts"))
}

// Logouts returns how many sessions ended by a logout in order.
func (l *LIO) Logouts() (int, error) {
	return readInt(filepath.Join(l.iqn, "fabric_statistics", "iscsi_logout_stats", "normal_logouts"))
}

// Core returns the configfs folder of the back end of a unit, for attributes and statistics.
func (l *LIO) Core(lun int) string { return l.luns[lun] }

// AddUnit adds a unit to the target while it runs; initiators see a changed inventory.
func (l *LIO) AddUnit(lun int, u Unit) error {
	core, err := l.makeCore(lun, u)
	if core != "" {
		l.luns[lun] = core
	}
	if err != nil {
		return fmt.Errorf("lun %d: %w", lun, err)
	}
	dir := filepath.Join(l.tpg, "lun", "lun_"+strconv.Itoa(lun))
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	return os.Symlink(core, filepath.Join(dir, "backend"))
}

// AddShared offers a unit of another target by this one too, under the same number: two ways to one unit that are nothing to each other for an initiator but
// the unit's serial number. This target is closed first.
func (l *LIO) AddShared(lun int, owner *LIO) error {
	l.luns[lun] = "" // the back end stays its owner's
	dir := filepath.Join(l.tpg, "lun", "lun_"+strconv.Itoa(lun))
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	return os.Symlink(owner.luns[lun], filepath.Join(dir, "backend"))
}

// RemoveUnit takes a unit away while the target runs.
func (l *LIO) RemoveUnit(lun int) error {
	dir := filepath.Join(l.tpg, "lun", "lun_"+strconv.Itoa(lun))
	errs := []error{remove(filepath.Join(dir, "backend")), remove(dir)}
	if core := l.luns[lun]; core != "" {
		errs = append(errs, remove(core))
		// The adapter goes when its last unit has gone; until then it is busy.
		if err := remove(filepath.Dir(core)); err != nil && !errors.Is(err, syscall.ENOTEMPTY) && !errors.Is(err, syscall.EBUSY) {
			errs = append(errs, err)
		}
	}
	delete(l.luns, lun)
	return errors.Join(errs...)
}

// Close ends the target's sessions and removes the target with its units; files of units stay. It is idempotent.
func (l *LIO) Close() error {
	if _, err := os.Stat(l.iqn); errors.Is(err, os.ErrNotExist) && len(l.luns) == 0 {
		return nil
	}
	var errs []error
	if _, err := os.Stat(l.tpg); err == nil {
		errs = append(errs, l.SetEnabled(false), l.closeGroup())
	}
	for _, name := range l.cfg.Initiators {
		acl := filepath.Join(l.tpg, "acls", name)
		mapped, _ := filepath.Glob(filepath.Join(acl, "lun_*"))
		for _, m := range mapped {
			errs = append(errs, remove(filepath.Join(m, "backend")), remove(m))
		}
		errs = append(errs, remove(acl))
	}
	for i := len(l.wires) - 1; i >= 0; i-- {
		errs = append(errs, remove(l.wires[i]))
	}
	for lun := range l.luns {
		errs = append(errs, l.RemoveUnit(lun))
	}
	errs = append(errs, remove(l.tpg), remove(l.iqn))
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("lio: remove target %s: %w", l.cfg.Name, err)
	}
	return nil
}

// RemovePortal closes an address; AddPortal opens it again.
func (l *LIO) RemovePortal(p Portal) error {
	dir := filepath.Join(l.tpg, "np", p.Addr.String())
	l.wires = slices.DeleteFunc(l.wires, func(w string) bool { return w == dir })
	return remove(dir)
}

// AddPortal opens one more address.
func (l *LIO) AddPortal(p Portal) error { return l.addPortal(p) }

// addPortal opens an address. iSER is a second listener beside TCP on the same address and port.
func (l *LIO) addPortal(p Portal) error {
	dir := filepath.Join(l.tpg, "np", p.Addr.String())
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	l.wires = append(l.wires, dir)
	if p.ISER {
		return write(filepath.Join(dir, "iser"), "1")
	}
	return nil
}

// mapUnit lets a named initiator see a unit under the same number.
func (l *LIO) mapUnit(initiator string, lun int) error {
	dir := filepath.Join(l.tpg, "acls", initiator, "lun_"+strconv.Itoa(lun))
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	if err := os.Symlink(filepath.Join(l.tpg, "lun", "lun_"+strconv.Itoa(lun)), filepath.Join(dir, "backend")); err != nil {
		return err
	}
	return write(filepath.Join(dir, "write_protect"), boolDigit(l.cfg.ReadOnly))
}

// makeCore makes the back end of a unit and returns its folder, which exists also when a later step failed.
func (l *LIO) makeCore(lun int, u Unit) (string, error) {
	var hba, control string
	switch u.Kind {
	case Ramdisk:
		hba, control = "rd_mcp_0", fmt.Sprintf("rd_pages=%d", u.Size/4096)
	case FileIO:
		if err := ensureFile(u.Path, u.Size); err != nil {
			return "", err
		}
		hba, control = "fileio_0", fmt.Sprintf("fd_dev_name=%s,fd_dev_size=%d", u.Path, u.Size)
		if u.WriteCache {
			control += ",fd_buffered_io=1"
		}
	case IBlock:
		hba, control = "iblock_0", "udev_path="+u.Path
	default:
		return "", fmt.Errorf("kind %q is unknown", u.Kind)
	}
	name := strings.NewReplacer(":", "_", ".", "_").Replace(l.cfg.Name) + "_" + strconv.Itoa(lun)
	dir := filepath.Join(configfs, "core", hba, name)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	if err := write(filepath.Join(dir, "control"), control); err != nil {
		return dir, err
	}
	// Product and serial have to be there before initiators are.
	if u.Product != "" {
		if err := write(filepath.Join(dir, "wwn", "product_id"), u.Product); err != nil {
			return dir, err
		}
	}
	if err := write(filepath.Join(dir, "enable"), "1"); err != nil {
		return dir, err
	}
	if err := write(filepath.Join(dir, "wwn", "vpd_unit_serial"), u.serial(l.cfg.Name, lun)); err != nil {
		return dir, err
	}
	if u.BlockSize != 0 {
		if err := write(filepath.Join(dir, "attrib", "block_size"), strconv.Itoa(u.BlockSize)); err != nil {
			return dir, err
		}
	}
	for k, v := range u.Attributes {
		if err := write(filepath.Join(dir, "attrib", k), v); err != nil {
			return dir, err
		}
	}
	return dir, nil
}

func (l *LIO) writeAll(dir string, values map[string]string) error {
	for k, v := range values {
		if err := write(filepath.Join(l.tpg, dir, k), v); err != nil {
			return err
		}
	}
	return nil
}

// write sets an attribute; the kernel's refusal comes from the write itself.
func write(path, value string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := f.WriteString(value); err != nil {
		return fmt.Errorf("%w (value %q)", err, value)
	}
	return nil
}

// remove removes a folder or link of configfs; that it is gone already is no error.
func remove(path string) error {
	if err := syscall.Unlink(path); err == nil || errors.Is(err, syscall.ENOENT) || errors.Is(err, syscall.ENOTDIR) {
		return nil
	}
	if err := syscall.Rmdir(path); err != nil && !errors.Is(err, syscall.ENOENT) {
		return &os.PathError{Op: "rmdir", Path: path, Err: err}
	}
	return nil
}

func readInt(path string) (int, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	n, err := strconv.Atoi(string(bytes.TrimSpace(b)))
	if err != nil {
		return 0, fmt.Errorf("%s: %w", path, err)
	}
	return n, nil
}

func boolDigit(b bool) string {
	if b {
		return "1"
	}
	return "0"
}
