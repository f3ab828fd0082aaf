package iscsitcp

import (
	"fmt"

	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/iscsi/login"
	"iserd.org/iserd/iscsi/pdu"
)

// settings are the negotiated values that a connection works by (RFC 7143 section 13), lengths in bytes.
type settings struct {
	initialR2T, immediateData bool
	maxBurst, firstBurst      int
	maxOutstandingR2T         int
	sendMax                   int // MaxRecvDataSegmentLength of the target, or ours if that is less; never 0
	recvMax                   int // MaxRecvDataSegmentLength that we have declared
	headerDigest, dataDigest  int // length of the digests: 0 or 4
}

// defaultSettings hold where nothing was negotiated.
var defaultSettings = settings{
	initialR2T: true, immediateData: true, maxBurst: 262144, firstBurst: 65536, maxOutstandingR2T: 1, sendMax: 8192,
	recvMax: MaxRecvDataSegmentLength,
}

// task is what the connection knows about an outstanding SCSI Command. The zero value is a free slot.
type task struct {
	t       *iscsi.Task
	itt     uint32
	lun     uint64
	sn      uint32 // next DataSN (read) or R2TSN (write)
	done    int    // bytes received (read), or promised to the target: sent or about to be (write)
	pending int    // the command and bursts of Data-Out that are not completely with the kernel
	r2ts    int    // R2Ts whose last Data-Out is not completely with the kernel
}

// find returns the task of a tag, nil if it is not outstanding.
func (c *Conn) find(itt uint32) *task {
	slot := int(itt & 0xffff)
	if slot >= len(c.tasks) || c.tasks[slot].t == nil || c.tasks[slot].itt != itt {
		return nil
	}
	return &c.tasks[slot]
}

func protocolError(section, format string, args ...any) error {
	return &pdu.ProtocolError{Section: section, Offset: -1, What: fmt.Sprintf(format, args...)}
}

// sendCommand enters a task into the table and queues its SCSI Command, with what may go without being asked for:
//
//	Data   |--immediate--|--unsolicited Data-Out--|--on R2T ...
//	       0             sendMax            FirstBurstLength     ExpectedDataTransferLength
func (c *Conn) sendCommand(bhs *pdu.BHS, t *iscsi.Task) error {
	itt := bhs.InitiatorTaskTag()
	slot := int(itt & 0xffff)
	switch {
	case slot >= len(c.tasks) || c.tasks[slot].t != nil:
		return fmt.Errorf("%w: tag %#08x is out of range or in use", errBroken, itt)
	case t.Length() > maxTransfer:
		return fmt.Errorf("%w: %d bytes of data, at most %d are possible", errBroken, t.Length(), maxTransfer)
	}
	k := &c.tasks[slot]
	*k = task{t: t, itt: itt, lun: bhs.LUN()}
	immediate, unsolicited := 0, 0
	if t.Direction == iscsi.Write {
		first := min(c.keys.firstBurst, t.Length())
		if c.keys.immediateData {
			immediate = min(first, c.keys.sendMax)
		}
		if !c.keys.initialR2T {
			unsolicited = first - immediate
		}
	}
	e, err := c.out.command()
	if err != nil {
		return err
	}
	e.bhs = *bhs
	e.bhs.SetFinal(unsolicited == 0)
	e.bhs.SetDataSegmentLength(immediate)
	e.slot, e.control, e.length = int32(slot), -1, int32(immediate)
	c.out.expStatSN = bhs.ExpStatSN()
	k.pending++
	k.done = immediate + unsolicited
	if unsolicited > 0 {
		k.pending++
		return c.out.burst(burst{slot: int32(slot), itt: itt, ttt: pdu.ReservedTag, offset: immediate, end: k.done})
	}
	return nil
}

// readyToTransfer answers an R2T: its Data-Out PDUs go with the next Flush (RFC 7143 section 11.8).
func (c *Conn) readyToTransfer(p pdu.R2T) error {
	k := c.find(p.InitiatorTaskTag())
	if k == nil {
		return protocolError("11.8", "R2T for Initiator Task Tag %#08x, which is not outstanding", p.InitiatorTaskTag())
	}
	offset, n := int64(p.BufferOffset()), int64(p.DesiredDataTransferLength())
	switch {
	case k.t.Direction != iscsi.Write:
		return protocolError("11.8", "R2T for command %#08x, which does not write", k.itt)
	case p.LUN() != k.lun:
		return protocolError("4.2.5.3", "R2T of command %#08x for LUN %#016x, the command has %#016x", k.itt, p.LUN(), k.lun)
	case p.R2TSN() != k.sn:
		return protocolError("11.8", "R2TSN %d of command %#08x, expected %d", p.R2TSN(), k.itt, k.sn)
	case n > int64(c.keys.maxBurst):
		return protocolError("11.8", "R2T of command %#08x asks for %d bytes, MaxBurstLength is %d", k.itt, n, c.keys.maxBurst)
	case offset+n > int64(k.t.Length()):
		return protocolError("11.8", "R2T of command %#08x asks for %d bytes at %d, the command has %d", k.itt, n, offset, k.t.Length())
	case offset != int64(k.done):
		return protocolError("13.19", "R2T of command %#08x asks for offset %d, the next in order is %d", k.itt, offset, k.done)
	case k.r2ts == c.keys.maxOutstandingR2T:
		return protocolError("13.17", "command %#08x has more than %d R2Ts outstanding", k.itt, c.keys.maxOutstandingR2T)
	}
	k.sn++
	k.r2ts++
	k.pending++
	k.done = int(offset + n)
	return c.out.burst(burst{
		slot: int32(k.itt & 0xffff), itt: k.itt, ttt: p.TargetTransferTag(), lun: k.lun, offset: int(offset), end: k.done,
	})
}

// respond ends a task with its SCSI Response: it counts the bytes, frees the slot and tells the session.
func (c *Conn) respond(bhs *pdu.BHS, data []byte) error {
	p := pdu.AsSCSIResponse(bhs)
	k := c.find(p.InitiatorTaskTag())
	if k == nil {
		return protocolError("11.4", "response to Initiator Task Tag %#08x, which is not outstanding", p.InitiatorTaskTag())
	}
	if k.pending > 0 {
		// Section 11.4: the target waits for the F bit of the last expected sequence. The memory cannot be given back.
		return protocolError("11.4", "response to command %#08x before the command and its data were sent", k.itt)
	}
	if p.Response() == pdu.ResponseCompleted && p.Status() == 0 {
		if err := k.complete(p); err != nil {
			return err
		}
	}
	*k = task{} // before the call: the session may use the slot again from within
	c.notifier.ControlNotify(bhs, data)
	return nil
}

// complete checks that a command with GOOD status has moved what it says it has.
func (k *task) complete(p pdu.SCSIResponse) error {
	want := int64(k.t.Length())
	if p.Underflow() {
		want -= int64(p.ResidualCount())
	}
	if k.t.Direction == iscsi.NoData || int64(k.done) >= want {
		return nil
	}
	if k.t.Direction == iscsi.Read {
		return protocolError("11.4", "command %#08x ends with GOOD status after %d bytes of Data-In, %d are due", k.itt, k.done, want)
	}
	return protocolError("11.4", "command %#08x ends with GOOD status, only %d of %d bytes were asked for", k.itt, k.done, want)
}

// DeallocateTaskResources forgets a task that the target has aborted. A task whose data is on its way in either direction takes the
// connection with it.
func (c *Conn) DeallocateTaskResources(t *iscsi.Task) error {
	k := c.find(t.ITT())
	if c.state != up || k == nil || k.t != t {
		return nil
	}
	if k.pending > 0 || c.in.task == k {
		err := fmt.Errorf("command %#08x was aborted while its data was moving", k.itt)
		c.ConnectionTerminate(err)
		return err
	}
	*k = task{}
	return nil
}

// settingsOf takes over what a login has negotiated.
func settingsOf(keys *login.Keys) settings {
	s := settings{
		initialR2T:        keys.InitialR2T,
		immediateData:     keys.ImmediateData,
		maxBurst:          int(keys.MaxBurstLength),
		firstBurst:        int(keys.FirstBurstLength),
		maxOutstandingR2T: int(keys.MaxOutstandingR2T),
		sendMax:           int(min(keys.TargetMaxRecvDataSegmentLength, MaxRecvDataSegmentLength)),
		recvMax:           int(keys.MaxRecvDataSegmentLength),
	}
	if keys.HeaderDigest == login.DigestCRC32C {
		s.headerDigest = digestLength
	}
	if keys.DataDigest == login.DigestCRC32C {
		s.dataDigest = digestLength
	}
	return s
}
