package scsi

import (
	"encoding/hex"
	"testing"
)

func TestReservationCDBs(t *testing.T) {
	var cdb CDB
	PersistentReserveIn(&cdb, ReadFullStatus, 0x1234)
	if got := hex.EncodeToString(cdb[:]); got != "5e030000000000123400000000000000" {
		t.Errorf("PERSISTENT RESERVE IN %s", got)
	}
	list := []byte("0123456789012345678901234567")
	PersistentReserveOut(&cdb, list, Preempt, ReserveParameters{
		Key: 0x0102030405060708, ActionKey: 0x1112131415161718, PersistLoss: true, AllTargetPorts: true, ReservationType: ExclusiveAccessAllRegistrants,
	})
	if got := hex.EncodeToString(cdb[:]); got != "5f040800000000001800000000000000" {
		t.Errorf("PERSISTENT RESERVE OUT %s", got)
	}
	if got := hex.EncodeToString(list); got != "010203040506070811121314151617180000000005000000"+"34353637" {
		t.Errorf("parameter list %s", got)
	}
	PersistentReserveOut(&cdb, list, RegisterAndIgnoreExistingKey, ReserveParameters{ActionKey: 1})
	if got := hex.EncodeToString(cdb[:]) + hex.EncodeToString(list[:24]); got != "5f060000000000001800000000000000"+"000000000000000000000000000000010000000000000000" {
		t.Errorf("register %s", got)
	}
}

func TestReservationTypes(t *testing.T) {
	for _, c := range []struct {
		text string
		want ReservationType
	}{
		{"we", WriteExclusive}, {"EA", ExclusiveAccess}, {"we-ro", WriteExclusiveRegistrantsOnly}, {"ea_ro", ExclusiveAccessRegistrantsOnly},
		{"Write Exclusive - All Registrants", WriteExclusiveAllRegistrants}, {"exclusive-access-all-registrants", ExclusiveAccessAllRegistrants},
		{"", 0}, {"5", 0}, {"type", 0},
	} {
		got, err := ParseReservationType(c.text)
		if got != c.want || (err == nil) != (c.want != 0) {
			t.Errorf("%q: %v, %v", c.text, got, err)
		}
		if err == nil {
			if again, err := ParseReservationType(got.String()); err != nil || again != got {
				t.Errorf("%v does not read its own name: %v, %v", got, again, err)
			}
		}
	}
	for i := range 16 {
		r := ReservationType(i)
		if r.Valid() != (i == 1 || i == 3 || i >= 5 && i <= 8) || r.OneNexus() != (i == 1 || i == 3) {
			t.Errorf("type %d: valid %v, one nexus %v", i, r.Valid(), r.OneNexus())
		}
	}
}

func FuzzReservation(f *testing.F) {
	for _, c := range captures(f, "testdata/reservation.hex") {
		f.Add(c.data)
	}
	seeds(f, "00000001ffffffff 0000000000000001", "00000001 00000018"+"0000000000000001 00000000 0100 0000 0000 0001 ffffffff")
	f.Fuzz(func(t *testing.T, b []byte) {
		if k, needed, err := ParseReadKeys(b); err != nil && (k.Keys != nil || needed != 0) || 8*len(k.Keys) > len(b) {
			t.Fatal(k, needed, err)
		}
		if r, err := ParseReadReservation(b); err != nil && r != (Reservation{}) || !r.Held && r.Key != 0 {
			t.Fatal(r, err)
		}
		if c, err := ParseReserveCapabilities(b); err != nil && c.Types != nil || len(c.Types) > 6 {
			t.Fatal(c, err)
		}
		generation, list, needed, err := ParseFullStatus(b)
		if err != nil && (generation != 0 || list != nil || needed != 0) || 24*len(list) > len(b) {
			t.Fatal(list, err)
		}
		for _, r := range list {
			printable(t, r.Initiator, r.Type.String())
		}
	})
}

func TestReadsOnly(t *testing.T) {
	for op := range 256 {
		cdb := make([]byte, 32)
		cdb[0] = byte(op)
		ok, why := ReadsOnly(cdb)
		if ok != (why == "") {
			t.Errorf("operation code %#02x: %v, %q", op, ok, why)
		}
		if n := CDBLength(byte(op)); n != 0 && (n < 6 || n > 16) {
			t.Errorf("operation code %#02x has %d bytes", op, n)
		}
	}
	// Of a family of commands only those that are known to leave everything as it is, and none that asks for an ACA.
	for cdb, want := range map[[16]byte]bool{
		{0x9e, 0x10}: true, {0x9e, 0x12}: true, {0x9e, 0x14}: false, {0x9e, 0x15}: false, {0x9e, 0x18}: false, {0x9e, 0x19}: false,
		{0x9e, 0x10, 15: 0x04}: false, {0x4d}: true, {0x4d, 0x01}: false, {0x12, 5: 0x04}: false, {0x12}: true, {0x28, 9: 0x04}: false,
	} {
		if ok, why := ReadsOnly(cdb[:max(CDBLength(cdb[0]), 6)]); ok != want {
			t.Errorf("% x: %v, %q", cdb, ok, why)
		}
	}
	// What a person might do without thinking of the file system on top.
	var cdb CDB
	for name, build := range map[string]func(){
		"WRITE(10)": func() { Write10(&cdb, 0, 1, false) }, "WRITE(16)": func() { Write16(&cdb, 0, 1, false) },
		"UNMAP": func() { Unmap(&cdb, 24) }, "WRITE SAME": func() { WriteSame16(&cdb, 0, 1, 0) },
		"PERSISTENT RESERVE OUT": func() { PersistentReserveOut(&cdb, make([]byte, 24), Reserve, ReserveParameters{}) },
		"FORMAT UNIT":            func() { cdb = CDB{0x04} }, "XDWRITEREAD(32)": func() { cdb = CDB{0x7f, 9: 7} }, "vendor": func() { cdb = CDB{0xc0} },
	} {
		if build(); cdb[0] == 0xff {
			t.Fatal("not built")
		}
		if ok, _ := ReadsOnly(cdb[:]); ok {
			t.Errorf("%s passes for one that changes nothing", name)
		}
	}
	if ok, _ := ReadsOnly([]byte{0x04}); ok {
		t.Error("short FORMAT UNIT")
	}
}
