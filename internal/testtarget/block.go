package testtarget

import (
	"bytes"
	"encoding/binary"
)

// Limits of the unit, shown in VPD page B0, in blocks and descriptors where nothing else is said.
const (
	unmapMax         = 1 << 16
	unmapDescriptors = 64
	writeSameMax     = 1 << 15
	compareMax       = 16
	transferMax      = 16 << 20 // bytes of READ, WRITE and VERIFY
)

// The block commands (SBC-3).
func init() {
	form6 := func(name string, run func(*request) result, c class, takes func(*Unit, []byte) int) *command {
		return &command{name: name, run: run, class: c, takes: takes, usage: "1fffffff 07"}
	}
	form := func(op byte, name string, run func(*request) result, c class, takes func(*Unit, []byte) int, flags string) *command {
		usage := map[int]string{
			10: "ffffffff 00ffff 07", 12: "ffffffff ffffffff 00 07", 16: "ffffffffffffffff ffffffff 00 07",
		}[cdbLength(op)]
		return &command{name: name, run: run, class: c, takes: takes, usage: flags + " " + usage}
	}
	table := map[int]*command{
		0x08: form6("READ(6)", read, reads, nil),
		0x0a: form6("WRITE(6)", write, writes, takesBlocks),
		0x35: form(0x35, "SYNCHRONIZE CACHE(10)", synchronize, writes, nil, "00"),
		0x91: form(0x91, "SYNCHRONIZE CACHE(16)", synchronize, writes, nil, "00"),
		0x34: form(0x34, "PRE-FETCH(10)", prefetch, reads, nil, "02"),
		0x90: form(0x90, "PRE-FETCH(16)", prefetch, reads, nil, "02"),
		0x42: {name: "UNMAP", run: unmap, class: writes, usage: "0000000000 00ffff 07", offered: hasUnmap},
		0x89: {name: "COMPARE AND WRITE", run: compareAndWrite, class: writes, usage: "18 ffffffffffffffff 000000 ff 00 07",
			takes: func(u *Unit, cdb []byte) int { return 2 * int(cdb[13]) * u.BlockSize }},
		0x41:   form(0x41, "WRITE SAME(10)", writeSame, writes, takesOne, "08"),
		0x93:   form(0x93, "WRITE SAME(16)", writeSame, writes, takesOne, "09"),
		0x9e12: {name: "GET LBA STATUS", run: lbaStatus, class: reads, usage: "12 ffffffffffffffff ffffffff 00 07", offered: func(u *Unit) bool { return u.Thin }},
	}
	for _, op := range []byte{0x28, 0xa8, 0x88} {
		table[int(op)] = form(op, "READ", read, reads, nil, "18")
		table[int(op)+2] = form(op, "WRITE", write, writes, takesBlocks, "18")
	}
	for _, op := range []byte{0x2e, 0xae, 0x8e} {
		table[int(op)] = form(op, "WRITE AND VERIFY", writeVerify, writes, takesBlocks, "16")
		table[int(op)+1] = form(op, "VERIFY", verify, reads, takesVerify, "16")
	}
	table[0x41].offered, table[0x93].offered = hasWriteSame, hasWriteSame
	register(table)
}

// extent reads LBA and length of a CDB. READ(6) and WRITE(6) have 256 blocks for a length of 0 (SBC-3).
func extent(cdb []byte) (lba, n uint64) {
	switch cdbLength(cdb[0]) {
	case 6:
		lba, n = uint64(binary.BigEndian.Uint32(cdb)&0x1fffff), uint64(cdb[4])
		if n == 0 {
			n = 256
		}
	case 10:
		lba, n = uint64(binary.BigEndian.Uint32(cdb[2:])), uint64(binary.BigEndian.Uint16(cdb[7:]))
	case 12:
		lba, n = uint64(binary.BigEndian.Uint32(cdb[2:])), uint64(binary.BigEndian.Uint32(cdb[6:]))
	case 16:
		lba, n = binary.BigEndian.Uint64(cdb[2:]), uint64(binary.BigEndian.Uint32(cdb[10:]))
	}
	return lba, n
}

func takesBlocks(u *Unit, cdb []byte) int {
	_, n := extent(cdb)
	return int(min(n, 1<<24)) * u.BlockSize
}

func takesVerify(u *Unit, cdb []byte) int {
	switch cdb[1] >> 1 & 3 { // BYTCHK
	case 1:
		return takesBlocks(u, cdb)
	case 3:
		return u.BlockSize
	}
	return 0
}

func takesOne(u *Unit, cdb []byte) int {
	if cdb[0] == 0x93 && cdb[1]&0x01 != 0 { // NDOB
		return 0
	}
	return u.BlockSize
}

func hasUnmap(u *Unit) bool     { return u.Thin && !u.NoUnmap }
func hasWriteSame(u *Unit) bool { return !u.NoWriteSame }

// outside tells whether a range is not inside the unit. u.mu is held.
func (u *Unit) outside(lba, n uint64) bool {
	total := u.blocks()
	return lba > total || n > total-lba || lba == total && n > 0
}

func outOfRange() result { return check(KeyIllegalRequest, 0x21, 0x00) }

// protected tells whether the command asks for protection information, which the unit has none of: RDPROTECT, WRPROTECT, VRPROTECT.
func protected(cdb []byte) bool { return cdbLength(cdb[0]) > 6 && cdb[1]&0xe0 != 0 }

// failed is what a store's error becomes.
func failed(write bool) result {
	if write {
		return check(KeyMediumError, 0x0c, 0x00) // WRITE ERROR
	}
	return check(KeyMediumError, 0x11, 0x00) // UNRECOVERED READ ERROR
}

func read(r *request) result {
	if protected(r.cdb) {
		return invalidField()
	}
	u := r.u
	u.mu.Lock()
	defer u.mu.Unlock()
	lba, n := extent(r.cdb)
	if u.outside(lba, n) {
		return outOfRange()
	}
	if n > transferMax/uint64(u.BlockSize) {
		return invalidField()
	}
	b := make([]byte, int(n)*u.BlockSize)
	if err := u.store.read(b, int64(lba)*int64(u.BlockSize)); err != nil {
		return failed(false)
	}
	return result{in: b}
}

// put writes blocks and takes what a thin unit needs for them. u.mu is held.
func (u *Unit) put(lba uint64, b []byte) result {
	n := uint64(len(b) / u.BlockSize)
	if r := u.take(lba, n); r.status != 0 {
		return r
	}
	if err := u.store.write(b, int64(lba)*int64(u.BlockSize)); err != nil {
		return failed(true)
	}
	return result{}
}

// take takes the space for blocks. u.mu is held.
func (u *Unit) take(lba, n uint64) result {
	if !u.Thin {
		return result{}
	}
	if u.Space > 0 && (u.held.count()+u.held.missing(lba, n))*uint64(u.BlockSize) > uint64(u.Space) {
		return check(KeyDataProtect, 0x27, 0x07) // SPACE ALLOCATION FAILED WRITE PROTECT
	}
	u.held.set(lba, n)
	return result{}
}

// readOnly is the answer to a write that the unit does not take, if it does not. u.mu is held.
func (u *Unit) readOnly() (result, bool) {
	if u.swp {
		return check(KeyDataProtect, 0x27, 0x02), true // LOGICAL UNIT SOFTWARE WRITE PROTECTED
	}
	return check(KeyDataProtect, 0x27, 0x00), u.ReadOnly // WRITE PROTECTED
}

func write(r *request) result {
	if protected(r.cdb) {
		return invalidField()
	}
	u := r.u
	u.mu.Lock()
	defer u.mu.Unlock()
	lba, n := extent(r.cdb)
	if u.outside(lba, n) {
		return outOfRange()
	}
	if n > transferMax/uint64(u.BlockSize) {
		return invalidField()
	}
	if answer, is := u.readOnly(); is {
		return answer
	}
	b := r.out[:min(len(r.out), int(n)*u.BlockSize)]
	return u.put(lba, b[:len(b)/u.BlockSize*u.BlockSize])
}

func writeVerify(r *request) result {
	if r.cdb[1]&0x06 == 0x04 || r.cdb[1]&0x06 == 0x06 {
		return invalidField() // BYTCHK is reserved or not supported
	}
	return write(r)
}

func verify(r *request) result {
	bytchk := r.cdb[1] >> 1 & 3
	if protected(r.cdb) || bytchk == 2 {
		return invalidField()
	}
	u := r.u
	u.mu.Lock()
	defer u.mu.Unlock()
	lba, n := extent(r.cdb)
	if u.outside(lba, n) {
		return outOfRange()
	}
	if n > transferMax/uint64(u.BlockSize) {
		return invalidField()
	}
	if bytchk == 0 || n == 0 {
		return result{}
	}
	b := make([]byte, int(n)*u.BlockSize)
	if err := u.store.read(b, int64(lba)*int64(u.BlockSize)); err != nil {
		return failed(false)
	}
	want := r.out
	if bytchk == 3 && len(want) >= u.BlockSize {
		want = bytes.Repeat(want[:u.BlockSize], int(n))
	}
	return compare(b, want)
}

// compare ends in MISCOMPARE DURING VERIFY OPERATION with the offset of the first difference.
func compare(have, want []byte) result {
	if bytes.Equal(have, want) {
		return result{}
	}
	for i := range min(len(have), len(want)) {
		if have[i] != want[i] {
			r := check(KeyMiscompare, 0x1d, 0x00)
			r.sense[0] |= 0x80 // the information field is valid
			binary.BigEndian.PutUint32(r.sense[3:], uint32(i))
			return r
		}
	}
	return result{}
}

func compareAndWrite(r *request) result {
	if protected(r.cdb) {
		return invalidField()
	}
	u := r.u
	u.mu.Lock()
	defer u.mu.Unlock()
	lba, n := binary.BigEndian.Uint64(r.cdb[2:]), uint64(r.cdb[13])
	if u.outside(lba, n) {
		return outOfRange()
	}
	size := int(n) * u.BlockSize
	if n > compareMax || r.edtl != 2*size {
		return invalidField() // more than VPD page B0 allows, or not what the initiator sends
	}
	if answer, is := u.readOnly(); is {
		return answer
	}
	b := make([]byte, size)
	if err := u.store.read(b, int64(lba)*int64(u.BlockSize)); err != nil {
		return failed(false)
	}
	if c := compare(b, r.out[:size]); c.status != 0 {
		return c
	}
	return u.put(lba, r.out[size:])
}

func synchronize(r *request) result {
	u := r.u
	u.mu.Lock()
	defer u.mu.Unlock()
	if lba, n := extent(r.cdb); u.outside(lba, n) {
		return outOfRange()
	}
	if err := u.store.sync(); err != nil {
		return failed(true)
	}
	return result{}
}

func prefetch(r *request) result {
	u := r.u
	u.mu.Lock()
	defer u.mu.Unlock()
	if lba, n := extent(r.cdb); u.outside(lba, n) {
		return outOfRange()
	}
	return result{}
}

// unmap takes a list of extents (SBC-3).
func unmap(r *request) result {
	if r.cdb[1]&1 != 0 {
		return invalidField() // ANCHOR
	}
	b := r.out[:min(len(r.out), int(binary.BigEndian.Uint16(r.cdb[7:])))]
	if len(b) == 0 {
		return result{}
	}
	if len(b) < 8 {
		return check(KeyIllegalRequest, 0x1a, 0x00)
	}
	list := b[8:min(len(b), 8+int(binary.BigEndian.Uint16(b[2:])))]
	list = list[:len(list)/16*16]
	if len(list) > 16*unmapDescriptors {
		return invalidParameter()
	}
	u := r.u
	u.mu.Lock()
	defer u.mu.Unlock()
	if answer, is := u.readOnly(); is {
		return answer
	}
	var total uint64
	for at := 0; at < len(list); at += 16 {
		lba, n := binary.BigEndian.Uint64(list[at:]), uint64(binary.BigEndian.Uint32(list[at+8:]))
		if u.outside(lba, n) {
			return outOfRange()
		}
		if total += n; total > unmapMax {
			return invalidParameter()
		}
	}
	for at := 0; at < len(list); at += 16 {
		lba, n := binary.BigEndian.Uint64(list[at:]), uint64(binary.BigEndian.Uint32(list[at+8:]))
		if c := u.release(lba, n); c.status != 0 {
			return c
		}
	}
	return result{}
}

// release makes blocks zero and gives their space back. u.mu is held.
func (u *Unit) release(lba, n uint64) result {
	if n == 0 {
		return result{}
	}
	if err := u.store.zero(int64(lba)*int64(u.BlockSize), int64(n)*int64(u.BlockSize)); err != nil {
		return failed(true)
	}
	u.held.clear(lba, n)
	return result{}
}

// writeSame writes one block many times, or gives the blocks up (SBC-3).
func writeSame(r *request) result {
	u, flags := r.u, r.cdb[1]
	u.mu.Lock()
	defer u.mu.Unlock()
	if answer, is := u.readOnly(); is {
		return answer
	}
	if protected(r.cdb) || flags&0x10 != 0 || flags&0x08 != 0 && !u.Thin {
		return invalidField()
	}
	ndob := r.cdb[0] == 0x93 && flags&1 != 0
	lba, n := extent(r.cdb)
	if u.outside(lba, n) {
		return outOfRange()
	}
	if n == 0 {
		if n = u.blocks() - lba; n > writeSameMax {
			return invalidField() // WSNZ is 0, but the rest of the unit is too much
		}
	}
	if n > writeSameMax {
		return invalidField()
	}
	block := make([]byte, u.BlockSize)
	if !ndob {
		if len(r.out) < u.BlockSize || r.edtl != u.BlockSize {
			return invalidField()
		}
		copy(block, r.out)
	}
	zero := bytes.Count(block, []byte{0}) == len(block)
	if flags&0x08 != 0 && zero {
		return u.release(lba, n)
	}
	if zero {
		if c := u.take(lba, n); c.status != 0 {
			return c
		}
		if err := u.store.zero(int64(lba)*int64(u.BlockSize), int64(n)*int64(u.BlockSize)); err != nil {
			return failed(true)
		}
		return result{}
	}
	return u.put(lba, bytes.Repeat(block, int(n)))
}

// lbaStatus tells which blocks hold data (SBC-3).
func lbaStatus(r *request) result {
	u := r.u
	u.mu.Lock()
	defer u.mu.Unlock()
	lba, allocation := binary.BigEndian.Uint64(r.cdb[2:]), int(binary.BigEndian.Uint32(r.cdb[10:]))
	total := u.blocks()
	if lba >= total {
		return outOfRange()
	}
	if allocation < 24 {
		return invalidField()
	}
	b := make([]byte, 8)
	for lba < total && len(b)+16 <= allocation && len(b) < 8+16*256 {
		end := lba + 1
		for has := u.held.has(lba); end < total && end-lba < 1<<24 && u.held.has(end) == has; end++ {
		}
		d := make([]byte, 16)
		binary.BigEndian.PutUint64(d, lba)
		binary.BigEndian.PutUint32(d[8:], uint32(end-lba))
		if !u.held.has(lba) {
			d[12] = 1 // deallocated
		}
		b = append(b, d...)
		lba = end
	}
	binary.BigEndian.PutUint32(b, uint32(len(b)-4))
	return data(b, allocation)
}
