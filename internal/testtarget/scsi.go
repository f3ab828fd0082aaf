package testtarget

import (
	"encoding/binary"
	"fmt"
	"sync"
)

// SCSI status (SAM-5 section 5.3.1).
const statusCheck = 0x02

// A Unit is a logical unit in memory. Its fields are set before the target starts; Mem is read and written under its lock.
type Unit struct {
	BlockSize int    // bytes; 0 means 512
	Serial    string // unit serial number; "" means one made of the LUN
	ReadOnly  bool

	// Fault is asked before each command; a status other than 0 is sent instead of executing it, with sense if not nil. It runs on
	// the connection's goroutine.
	Fault func(cdb []byte) (status byte, sense []byte)

	mu  sync.Mutex // guards mem
	mem []byte
}

// NewUnit makes a unit of size bytes.
func NewUnit(size int) *Unit { return &Unit{mem: make([]byte, size)} }

func (u *Unit) setDefaults(lun int) {
	if u.BlockSize == 0 {
		u.BlockSize = 512
	}
	if u.Serial == "" {
		u.Serial = fmt.Sprintf("iserd-test-%04d", lun)
	}
}

// Resize changes the size in bytes; content is kept as far as it fits.
func (u *Unit) Resize(size int) {
	u.mu.Lock()
	defer u.mu.Unlock()
	mem := make([]byte, size)
	copy(mem, u.mem)
	u.mem = mem
}

// ReadAt copies content out; it implements io.ReaderAt for a range inside the unit.
func (u *Unit) ReadAt(b []byte, off int64) (int, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	return copy(b, u.mem[off:]), nil
}

// WriteAt copies content in; it implements io.WriterAt for a range inside the unit.
func (u *Unit) WriteAt(b []byte, off int64) (int, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	return copy(u.mem[off:], b), nil
}

func (u *Unit) blocks() uint64 {
	u.mu.Lock()
	defer u.mu.Unlock()
	return uint64(len(u.mem) / u.BlockSize)
}

// Sense makes fixed format sense data (SPC-4 section 4.5.3).
func Sense(key, asc, ascq byte) []byte {
	s := make([]byte, 18)
	s[0], s[2], s[7], s[12], s[13] = 0x70, key, 10, asc, ascq
	return s
}

func senseIllegal(asc, ascq byte) []byte { return Sense(0x05, asc, ascq) }

// decodeLUN takes the first level of a LUN, peripheral or flat (SAM-5 section 4.7.7); -1 for what it cannot tell.
func decodeLUN(b []byte) int {
	if b[2]|b[3]|b[4]|b[5]|b[6]|b[7] != 0 {
		return -1
	}
	switch b[0] >> 6 {
	case 0:
		if b[0] == 0 {
			return int(b[1])
		}
	case 1:
		return int(b[0]&0x3f)<<8 | int(b[1])
	}
	return -1
}

func encodeLUN(b []byte, lun int) {
	clear(b[:8])
	if lun < 256 {
		b[1] = byte(lun)
		return
	}
	b[0], b[1] = 0x40|byte(lun>>8), byte(lun)
}

func (c *Conn) unit(lun int) *Unit {
	if units := c.target.config.Units; lun >= 0 && lun < len(units) {
		return units[lun]
	}
	return nil
}

// dataOutLength tells how many bytes a command takes from the initiator; -1 when it takes what comes.
func dataOutLength(u *Unit, cdb []byte) int {
	if u == nil {
		return -1
	}
	switch cdb[0] {
	case 0x2a:
		return int(binary.BigEndian.Uint16(cdb[7:])) * u.BlockSize
	case 0x8a:
		return int(min(binary.BigEndian.Uint32(cdb[10:]), 1<<24)) * u.BlockSize
	}
	return -1
}

// run executes a command and returns what goes to the initiator.
func (t *Target) run(lun int, cdb, out []byte) (in []byte, status byte, sense []byte) {
	illegal := func(asc, ascq byte) ([]byte, byte, []byte) { return nil, statusCheck, senseIllegal(asc, ascq) }
	if cdb[0] == 0xa0 { // REPORT LUNS answers at any LUN
		return clip(t.reportLUNs(), int(binary.BigEndian.Uint32(cdb[6:]))), 0, nil
	}
	var u *Unit
	if lun >= 0 && lun < len(t.config.Units) {
		u = t.config.Units[lun]
	}
	if u == nil {
		if cdb[0] == 0x12 && cdb[1]&1 == 0 {
			b := inquiry()
			b[0] = 0x7f // no unit here
			return clip(b, int(binary.BigEndian.Uint16(cdb[3:]))), 0, nil
		}
		return illegal(0x25, 0x00) // LOGICAL UNIT NOT SUPPORTED
	}
	switch cdb[0] {
	case 0x28, 0x2a, 0x88, 0x8a:
		if cdb[1]&0xe0 != 0 { // RDPROTECT, WRPROTECT: the unit has no protection information
			return illegal(0x24, 0x00)
		}
	}
	switch cdb[0] {
	case 0x00, 0x35, 0x91: // TEST UNIT READY, SYNCHRONIZE CACHE (10), (16)
		return nil, 0, nil
	case 0x03: // REQUEST SENSE
		return clip(Sense(0, 0, 0), int(cdb[4])), 0, nil
	case 0x12:
		b := inquiry()
		switch {
		case cdb[1]&1 != 0:
			if b = u.page(cdb[2]); b == nil {
				return illegal(0x24, 0x00)
			}
		case cdb[2] != 0:
			return illegal(0x24, 0x00)
		}
		return clip(b, int(binary.BigEndian.Uint16(cdb[3:]))), 0, nil
	case 0x1a, 0x5a: // MODE SENSE (6), (10)
		return u.modeSense(cdb)
	case 0x25: // READ CAPACITY (10)
		b := make([]byte, 8)
		binary.BigEndian.PutUint32(b, uint32(min(u.blocks()-1, 0xffffffff)))
		binary.BigEndian.PutUint32(b[4:], uint32(u.BlockSize))
		return b, 0, nil
	case 0x9e:
		if cdb[1]&0x1f != 0x10 { // READ CAPACITY (16)
			return illegal(0x20, 0x00)
		}
		b := make([]byte, 32)
		binary.BigEndian.PutUint64(b, u.blocks()-1)
		binary.BigEndian.PutUint32(b[8:], uint32(u.BlockSize))
		return clip(b, int(binary.BigEndian.Uint32(cdb[10:]))), 0, nil
	case 0x28:
		return u.transfer(false, uint64(binary.BigEndian.Uint32(cdb[2:])), uint64(binary.BigEndian.Uint16(cdb[7:])), nil)
	case 0x88:
		return u.transfer(false, binary.BigEndian.Uint64(cdb[2:]), uint64(binary.BigEndian.Uint32(cdb[10:])), nil)
	case 0x2a:
		return u.transfer(true, uint64(binary.BigEndian.Uint32(cdb[2:])), uint64(binary.BigEndian.Uint16(cdb[7:])), out)
	case 0x8a:
		return u.transfer(true, binary.BigEndian.Uint64(cdb[2:]), uint64(binary.BigEndian.Uint32(cdb[10:])), out)
	}
	return illegal(0x20, 0x00) // INVALID COMMAND OPERATION CODE
}

func (u *Unit) transfer(write bool, lba, blocks uint64, out []byte) ([]byte, byte, []byte) {
	u.mu.Lock()
	defer u.mu.Unlock()
	total := uint64(len(u.mem) / u.BlockSize)
	if lba > total || blocks > total-lba {
		return nil, statusCheck, senseIllegal(0x21, 0x00) // LBA OUT OF RANGE
	}
	off, n := int(lba)*u.BlockSize, int(blocks)*u.BlockSize
	if !write {
		return append([]byte(nil), u.mem[off:off+n]...), 0, nil
	}
	if u.ReadOnly {
		return nil, statusCheck, Sense(0x07, 0x27, 0x00) // WRITE PROTECTED
	}
	copy(u.mem[off:off+n], out)
	return nil, 0, nil
}

func (t *Target) reportLUNs() []byte {
	b := make([]byte, 8)
	for lun, u := range t.config.Units {
		if u != nil {
			var l [8]byte
			encodeLUN(l[:], lun)
			b = append(b, l[:]...)
		}
	}
	binary.BigEndian.PutUint32(b, uint32(len(b)-8))
	return b
}

func inquiry() []byte {
	b := make([]byte, 74)
	b[2], b[3], b[4], b[7] = 0x06, 0x02, byte(len(b)-5), 0x02  // SPC-4, response format 2, CmdQue
	for i, version := range []uint16{0x0960, 0x0460, 0x04c0} { // iSCSI, SPC-4, SBC-3
		binary.BigEndian.PutUint16(b[58+2*i:], version)
	}
	copy(b[8:], "ISERD   ")
	copy(b[16:], "TEST TARGET     ")
	copy(b[32:], "1   ")
	return b
}

// page returns a vital product data page, nil for one that there is not.
func (u *Unit) page(code byte) []byte {
	var body []byte
	switch code {
	case 0x00:
		body = []byte{0x00, 0x80, 0x83, 0xb0, 0xb1}
	case 0x80:
		body = []byte(u.Serial)
	case 0x83:
		t10 := append([]byte("ISERD   "), u.Serial...)
		body = append([]byte{0x02, 0x01, 0, byte(len(t10))}, t10...)
		naa := make([]byte, 16) // NAA 6, made of the serial number by FNV-1a
		h := uint64(14695981039346656037)
		for _, ch := range []byte(u.Serial) {
			h = (h ^ uint64(ch)) * 1099511628211
		}
		naa[0] = 0x60
		binary.BigEndian.PutUint64(naa[8:], h)
		body = append(append(body, 0x01, 0x03, 0, 16), naa...)
	case 0xb0:
		body = make([]byte, 60)
		binary.BigEndian.PutUint16(body[2:], 1)                            // optimal transfer length granularity
		binary.BigEndian.PutUint32(body[4:], uint32((16<<20)/u.BlockSize)) // maximum transfer length, blocks
	case 0xb1:
		body = make([]byte, 60)
		body[1] = 1 // non-rotating
	default:
		return nil
	}
	return append([]byte{0, code, byte(len(body) >> 8), byte(len(body))}, body...)
}

// modeSense answers with the caching page (WCE set) and the control page, and tells whether the unit is write protected.
func (u *Unit) modeSense(cdb []byte) ([]byte, byte, []byte) {
	caching := make([]byte, 20)
	caching[0], caching[1], caching[2] = 0x08, 18, 0x04
	control := make([]byte, 12)
	control[0], control[1] = 0x0a, 10
	var pages []byte
	switch cdb[2] & 0x3f {
	case 0x08:
		pages = caching
	case 0x0a:
		pages = control
	case 0x3f:
		pages = append(caching, control...)
	default:
		return nil, statusCheck, senseIllegal(0x24, 0x00)
	}
	if cdb[2]>>6 == 1 { // what can be changed: nothing
		for at := 0; at < len(pages); at += 2 + int(pages[at+1]) {
			clear(pages[at+2 : at+2+int(pages[at+1])])
		}
	}
	device := byte(0x10) // DPOFUA
	if u.ReadOnly {
		device |= 0x80
	}
	if cdb[0] == 0x1a {
		b := append([]byte{0, 0, device, 0}, pages...)
		b[0] = byte(len(b) - 1)
		return clip(b, int(cdb[4])), 0, nil
	}
	b := append([]byte{0, 0, 0, device, 0, 0, 0, 0}, pages...)
	binary.BigEndian.PutUint16(b, uint16(len(b)-2))
	return clip(b, int(binary.BigEndian.Uint16(cdb[7:]))), 0, nil
}

func clip(b []byte, n int) []byte { return b[:min(len(b), n)] }
