package scsi

import (
	"errors"
	"syscall"
	"testing"
)

func TestSense(t *testing.T) {
	for _, c := range []struct {
		in, text string
		want     Sense
	}{
		{"70 00 05 00000000 0a 00000000 20 00 00 000000", "illegal request 05/20/00: invalid command operation code",
			Sense{Key: 5, ASC: 0x20}},
		{"f0 00 03 00001267 0a 00000000 11 00 00 000000", "medium error 03/11/00: unrecovered read error at LBA 4711",
			Sense{Key: 3, ASC: 0x11, InfoValid: true, Information: 4711}},
		{"70 00 05 00000000 0a 00000000 24 00 00 c0000a", "illegal request 05/24/00: invalid field in cdb (byte 10 of the CDB)",
			Sense{Key: 5, ASC: 0x24, FieldValid: true, Field: 10, FieldInCDB: true}},
		{"70 00 02 00000000 0a 00000000 04 04 00 808000", "not ready 02/04/04: format in progress (50% done)",
			Sense{Key: 2, ASC: 4, ASCQ: 4, InProgress: true, Progress: 0x8000}},
		{"71 00 03 00000000 0a 00000000 0c 02 00 000000",
			"medium error 03/0c/02: write error, auto reallocation failed (deferred: an earlier command failed)",
			Sense{Key: 3, ASC: 0x0c, ASCQ: 2, Deferred: true}},
		{"70 00 06", "unit attention 06/00/00", Sense{Key: 6}},
		{"70 00 06 00000000 02 0000 0000 29 00", "unit attention 06/00/00", Sense{Key: 6}}, // additional length ends before ASC
		{"72 06 2a 09 00 00 00 00", "unit attention 06/2a/09: capacity data has changed", Sense{Key: 6, ASC: 0x2a, ASCQ: 9}},
		{"72 03 11 7f 00 00 00 14 000a 8000 0000000200000001 0206 000080 123400 00", "medium error 03/11/7f: unrecovered read error at LBA 8589934593",
			Sense{Key: 3, ASC: 0x11, ASCQ: 0x7f, InfoValid: true, Information: 0x200000001}},
		{"72 02 04 01 00 00 00 08 0206 0000 804000 00", "not ready 02/04/01: becoming ready (25% done)",
			Sense{Key: 2, ASC: 4, ASCQ: 1, InProgress: true, Progress: 0x4000}},
		{"73 03 00 00", "medium error 03/00/00 (deferred: an earlier command failed)", Sense{Key: 3, Deferred: true}},
		{"72 03 11 00 00 00 00 ff 00ff 80", "medium error 03/11/00: unrecovered read error", Sense{Key: 3, ASC: 0x11}},
	} {
		s, err := ParseSense(unhex(t, c.in))
		if err != nil || s != c.want {
			t.Errorf("%s:\n got %+v, %v\nwant %+v", c.in, s, err, c.want)
			continue
		}
		if got := s.String(); got != c.text {
			t.Errorf("%s: %q", c.in, got)
		}
	}
	for _, in := range []string{"", "70", "7000", "000003", "7f0003", "740300"} {
		if s, err := ParseSense(unhex(t, in)); err == nil || s != (Sense{}) {
			t.Errorf("%q: %+v", in, s)
		}
	}
}

func TestStatusError(t *testing.T) {
	for _, c := range []struct {
		status Status
		sense  *Sense
		want   error
	}{
		{StatusReservationConflict, nil, ErrReservationConflict},
		{StatusBusy, nil, ErrBusy},
		{StatusTaskSetFull, nil, ErrTaskSetFull},
		{StatusTaskAborted, nil, ErrAborted},
		{StatusCheckCondition, &Sense{Key: 2, ASC: 4, ASCQ: 1}, ErrNotReady},
		{StatusCheckCondition, &Sense{Key: 3, ASC: 0x11}, ErrMediumError},
		{StatusCheckCondition, &Sense{Key: 4}, ErrHardwareError},
		{StatusCheckCondition, &Sense{Key: 5, ASC: 0x20}, ErrIllegalRequest},
		{StatusCheckCondition, &Sense{Key: 5, ASC: 0x25}, ErrUnitGone},
		{StatusCheckCondition, &Sense{Key: 5, ASC: 0x10, ASCQ: 1}, ErrProtection},
		{StatusCheckCondition, &Sense{Key: 6, ASC: 0x29}, ErrUnitAttention},
		{StatusCheckCondition, &Sense{Key: 7, ASC: 0x27}, ErrDataProtect},
		{StatusCheckCondition, &Sense{Key: 7, ASC: 0x27, ASCQ: 7}, ErrNoSpace},
		{StatusCheckCondition, &Sense{Key: 0xb, ASC: 0x44}, ErrAborted},
		{StatusCheckCondition, &Sense{Key: 0xb, ASC: 0x10}, ErrProtection},
	} {
		err := error(&StatusError{Status: c.status, Sense: c.sense})
		if !errors.Is(err, c.want) || err.Error() == "" {
			t.Errorf("%v does not mean %v", err, c.want)
		}
	}
	if errors.Unwrap(&StatusError{Status: StatusCheckCondition}) != nil || errors.Unwrap(&StatusError{Status: 0x77}) != nil {
		t.Error("a meaning was made up")
	}
	if got := (&StatusError{Status: StatusCheckCondition, Sense: &Sense{Key: 5, ASC: 0x25}}).Error(); got != "CHECK CONDITION: illegal request 05/25/00: logical unit not supported" {
		t.Error(got)
	}
	if got := (&StatusError{Status: 0x77}).Error(); got != "status 0x77" {
		t.Error(got)
	}
}

func TestClassify(t *testing.T) {
	const none = SenseKey(0xff)
	for _, c := range []struct {
		status    Status
		key       SenseKey
		asc, ascq uint8
		kind      Kind
		errno     syscall.Errno
		attention Attention
	}{
		{StatusGood, none, 0, 0, Done, 0, AttentionNone},
		{StatusConditionMet, none, 0, 0, Done, 0, AttentionNone},
		{StatusBusy, none, 0, 0, RetryDelay, syscall.EBUSY, AttentionNone},
		{StatusTaskSetFull, none, 0, 0, RetryDelay, syscall.EBUSY, AttentionNone},
		{StatusACAActive, none, 0, 0, RetryDelay, syscall.EBUSY, AttentionNone},
		{StatusTaskAborted, none, 0, 0, RetryNow, syscall.EIO, AttentionNone},
		{StatusReservationConflict, none, 0, 0, Fail, syscall.EBADE, AttentionNone},
		{StatusCheckCondition, none, 0, 0, Fail, syscall.EIO, AttentionNone},
		{0x77, none, 0, 0, Fail, syscall.EIO, AttentionNone},
		{StatusCheckCondition, KeyNoSense, 0, 0, RetryNow, syscall.EIO, AttentionNone},
		{StatusCheckCondition, KeyRecoveredError, 0x17, 0, Done, 0, AttentionNone},
		{StatusCheckCondition, KeyNotReady, 0x04, 0x01, RetryDelay, syscall.EIO, AttentionNone},
		{StatusCheckCondition, KeyNotReady, 0x04, 0x02, Fail, syscall.EIO, AttentionNone},
		{StatusCheckCondition, KeyNotReady, 0x04, 0x0a, RetryDelay, syscall.ENOLINK, AttentionALUAChanged},
		{StatusCheckCondition, KeyNotReady, 0x04, 0x0b, Fail, syscall.ENOLINK, AttentionALUAChanged},
		{StatusCheckCondition, KeyNotReady, 0x3a, 0x02, Fail, syscall.ENODEV, AttentionNone},
		{StatusCheckCondition, KeyMediumError, 0x11, 0x04, Fail, syscall.ENODATA, AttentionNone},
		{StatusCheckCondition, KeyMediumError, 0x0c, 0, Fail, syscall.ENODATA, AttentionNone},
		{StatusCheckCondition, KeyHardwareError, 0x44, 0, Fail, syscall.EREMOTEIO, AttentionNone},
		{StatusCheckCondition, KeyIllegalRequest, 0x20, 0, Fail, syscall.EREMOTEIO, AttentionNone},
		{StatusCheckCondition, KeyIllegalRequest, 0x21, 0, Fail, syscall.EREMOTEIO, AttentionNone},
		{StatusCheckCondition, KeyIllegalRequest, 0x25, 0, Fail, syscall.ENODEV, AttentionLunsChanged},
		{StatusCheckCondition, KeyIllegalRequest, 0x10, 3, Fail, syscall.EILSEQ, AttentionNone},
		{StatusCheckCondition, KeyUnitAttention, 0x29, 0x07, RetryNow, syscall.EIO, AttentionReset},
		{StatusCheckCondition, KeyUnitAttention, 0x2a, 0x01, RetryNow, syscall.EIO, AttentionModeChanged},
		{StatusCheckCondition, KeyUnitAttention, 0x2a, 0x09, RetryNow, syscall.EIO, AttentionCapacityChanged},
		{StatusCheckCondition, KeyUnitAttention, 0x2a, 0x06, RetryNow, syscall.EIO, AttentionALUAChanged},
		{StatusCheckCondition, KeyUnitAttention, 0x3f, 0x0e, RetryNow, syscall.EIO, AttentionLunsChanged},
		{StatusCheckCondition, KeyUnitAttention, 0x3f, 0x03, RetryNow, syscall.EIO, AttentionInquiryChanged},
		{StatusCheckCondition, KeyUnitAttention, 0x38, 0x07, RetryNow, syscall.EIO, AttentionSpaceThreshold},
		{StatusCheckCondition, KeyUnitAttention, 0x5d, 0, RetryNow, syscall.EIO, AttentionOther},
		{StatusCheckCondition, KeyDataProtect, 0x27, 0x00, Fail, syscall.EIO, AttentionModeChanged},
		{StatusCheckCondition, KeyDataProtect, 0x27, 0x07, Fail, syscall.ENOSPC, AttentionNone},
		{StatusCheckCondition, KeyAbortedCommand, 0x44, 0, RetryNow, syscall.EIO, AttentionNone},
		{StatusCheckCondition, KeyAbortedCommand, 0x10, 1, Fail, syscall.EILSEQ, AttentionNone},
		{StatusCheckCondition, KeyVendorSpecific, 0, 0, Fail, syscall.EIO, AttentionNone},
		{StatusCheckCondition, KeyMiscompare, 0x1d, 0, Fail, syscall.EREMOTEIO, AttentionNone},
	} {
		var s *Sense
		if c.key != none {
			s = &Sense{Key: c.key, ASC: c.asc, ASCQ: c.ascq}
		}
		a := Classify(c.status, s)
		if a.Kind != c.kind || a.Errno != c.errno || a.Attention != c.attention {
			t.Errorf("%v %x/%02x/%02x: %v %v %v", c.status, c.key, c.asc, c.ascq, a.Kind, a.Errno, a.Attention)
		}
	}
	if a := Classify(StatusCheckCondition, &Sense{Key: KeyMediumError, Deferred: true}); a.Kind != RetryNow || a.Attention != AttentionDeferred {
		t.Errorf("deferred error: %+v", a)
	}
	for _, asc := range []uint8{0x20, 0x24, 0x26} {
		if !Classify(StatusCheckCondition, &Sense{Key: KeyIllegalRequest, ASC: asc}).Unsupported {
			t.Errorf("05/%02x does not count as unsupported", asc)
		}
	}
}

// TestSenseTable: every row can be reached, and says why.
func TestSenseTable(t *testing.T) {
	for i, r := range senseTable {
		s := Sense{Key: r.key, ASC: 0xee, ASCQ: 0xee}
		if r.asc != anyCode {
			s.ASC = uint8(r.asc)
		}
		if r.ascq != anyCode {
			s.ASCQ = uint8(r.ascq)
		}
		if got := classifySense(&s); got != r.action || r.why == "" {
			t.Errorf("row %d (%v %#x %#x) is hidden by an earlier one: %+v", i, r.key, r.asc, r.ascq, got)
		}
		if r.action.Kind != Done && r.action.Errno == 0 {
			t.Errorf("row %d has no errno", i)
		}
	}
}

func TestNames(t *testing.T) {
	for _, s := range []string{
		TypeDisk.String(), DeviceType(0x19).String(), KeyCompleted.String(), RetryDelay.String(), Kind(99).String(), AttentionDeferred.String(),
		Attention(99).String(), Transitioning.String(), AccessState(7).String(), StatusACAActive.String(), ASCName(0x29, 0x99),
	} {
		if s == "" {
			t.Error("no name")
		}
	}
	if ASCName(0xff, 0xff) != "" {
		t.Error("a name was made up")
	}
}
