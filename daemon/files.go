package daemon

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/ipc"
)

// deviceRecord is what RUN/devices/N.json holds: which unit a block device is, and how it was made. It is written before the device can be
// seen and removed after it is gone, so that whatever a daemon was doing when it died, its successor knows which devices are ours.
type deviceRecord struct {
	Schema    int           `json:"schema"`
	UblkID    int           `json:"ublk_id"`
	Group     string        `json:"group"`
	Target    string        `json:"target"`
	Portal    string        `json:"portal"`
	Transport ipc.Transport `json:"transport"`
	TPGT      uint16        `json:"tpgt"`
	Others    []ipc.Route   `json:"others,omitempty"` // further portals, see ipc.LoginRequest
	PID       int           `json:"pid"`              // data plane that serves it
	Queues    int           `json:"queues"`
	Depth     int           `json:"depth"`
	MaxIO     int           `json:"max_io"`
	Unit      ipc.Unit      `json:"unit"`
	Created   time.Time     `json:"created"`
}

const deviceSchema = 1

func devicePath(id int) string { return "/dev/ublkb" + strconv.Itoa(id) }

func (r *deviceRecord) path() string { return devicePath(r.UblkID) }

func (s *Service) deviceDir() string { return filepath.Join(s.opt.RunDir, "devices") }

// writeDevice stores the record, and next to it N.env with the properties for udev. RUN is a tmpfs: the rename is for readers, not for power
// failures.
func (s *Service) writeDevice(r deviceRecord) error {
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return fmt.Errorf("encode device record: %w", err)
	}
	base := filepath.Join(s.deviceDir(), strconv.Itoa(r.UblkID))
	for _, f := range []struct {
		path string
		text []byte
		mode os.FileMode
	}{{base + ".env", []byte(r.properties()), 0o644}, {base + ".json", append(b, '\n'), 0o600}} {
		tmp := f.path + ".tmp"
		if err := os.WriteFile(tmp, f.text, f.mode); err != nil {
			return fmt.Errorf("write device record: %w", err)
		}
		if err := os.Rename(tmp, f.path); err != nil {
			return fmt.Errorf("write device record: %w", err)
		}
	}
	return nil
}

func (s *Service) removeDevice(id int) {
	base := filepath.Join(s.deviceDir(), strconv.Itoa(id))
	for _, ext := range []string{".json", ".env", ".json.tmp", ".env.tmp"} {
		if err := os.Remove(base + ext); err != nil && !os.IsNotExist(err) {
			s.log.WithError(err).Warn("device record stays behind")
		}
	}
}

// readDevices returns the records, by number. A damaged one is logged and left out: its device is then not ours to touch.
func (s *Service) readDevices() map[int]deviceRecord {
	out := make(map[int]deviceRecord)
	files, _ := filepath.Glob(filepath.Join(s.deviceDir(), "*.json"))
	for _, f := range files {
		var r deviceRecord
		b, err := os.ReadFile(f)
		if err == nil {
			err = json.Unmarshal(b, &r)
		}
		if err == nil && (r.Schema != deviceSchema || filepath.Base(f) != strconv.Itoa(r.UblkID)+".json") {
			err = fmt.Errorf("schema %d, device %d", r.Schema, r.UblkID)
		}
		if err == nil {
			err = api.CheckName(r.Target)
		}
		if err != nil {
			s.log.WithError(err).Errorf("device record %s cannot be used", f)
			continue
		}
		out[r.UblkID] = r
	}
	return out
}

// DeviceQueues is the number of queues of that device of a run directory which has most; 0 without devices. A data plane that takes them over needs a
// thread for each.
func DeviceQueues(runDir string) (most int) {
	files, _ := filepath.Glob(filepath.Join(runDir, "devices", "*.json"))
	for _, f := range files {
		var r deviceRecord
		if b, err := os.ReadFile(f); err == nil && json.Unmarshal(b, &r) == nil { // readDevices complains of others
			most = max(most, r.Queues)
		}
	}
	return most
}

// properties are udev properties of the device, KEY=VALUE lines.
func (r *deviceRecord) properties() string {
	p, _ := api.ParsePortal(r.Portal)
	u := &r.Unit
	var b strings.Builder
	put := func(key, value string) {
		if v := safe(value); v != "" {
			b.WriteString(key + "=" + v + "\n")
		}
	}
	put("ISER_DEVICE", "1")
	put("ISER_TARGET", r.Target)
	put("ISER_ADDRESS", p.Address)
	put("ISER_PORT", strconv.Itoa(int(p.Port)))
	put("ISER_TRANSPORT", string(r.Transport))
	put("ISER_LUN", strconv.Itoa(int(u.Number)))
	put("ID_BUS", "scsi")
	put("ID_TYPE", "disk")
	put("ID_VENDOR", u.Vendor)
	put("ID_MODEL", u.Product)
	put("ID_REVISION", u.Revision)
	put("ID_SCSI_SERIAL", u.Serial)
	kind, id, ok := strings.Cut(u.WWID, ".")
	if digit, known := map[string]string{"naa": "3", "eui": "2", "t10": "1"}[kind]; ok && known {
		put("ID_SERIAL", digit+id)
		put("ID_SERIAL_SHORT", id)
		if kind == "naa" && len(id) >= 16 {
			put("ID_WWN", "0x"+id[:16])
			put("ID_WWN_WITH_EXTENSION", "0x"+id)
		}
	}
	put("ID_PATH", fmt.Sprintf("ip-%s:%d-iscsi-%s-lun-%s", p.Address, p.Port, r.Target, pathLUN(u.Number)))
	return b.String()
}

// pathLUN writes a number as udev's path_id does: above 255 in the flat form of SAM.
func pathLUN(n uint16) string {
	if n < 256 {
		return strconv.Itoa(int(n))
	}
	return fmt.Sprintf("0x%04x000000000000", 0x4000|n)
}

// safe leaves only characters that mean nothing to udev, a shell or a file name. What a target says about itself goes through here.
func safe(v string) string {
	v = strings.Map(func(c rune) rune {
		switch {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9', strings.ContainsRune("#+-.:=@_%", c):
			return c
		}
		return '_'
	}, strings.TrimSpace(v))
	if len(v) > 255 {
		v = v[:255]
	}
	return v
}
