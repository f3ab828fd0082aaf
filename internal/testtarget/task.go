package testtarget

import "errors"

// task is one SCSI command on its way through the target:
//
//	command -> get (Data-Out or RDMA Read) until all of its data has come -> execute -> parked? -> carryOut -> put (Data-In or RDMA Write)
//	-> response
type task struct {
	c     *Conn
	itt   uint32
	lun   int
	cdb   []byte
	edtl  int // Expected Data Transfer Length, bytes
	read  bool
	data  []byte // of a write
	got   int    // bytes that have come
	asked int    // bytes that came unsolicited or were asked for
	need  int    // bytes that the command takes

	r2tSN   uint32
	bursts  []*burst
	dataSNs uint32 // Data-In PDUs sent

	iser [iserHeader]byte // the STags of the initiator's memory
}

// burst is a sequence of Data-Out PDUs: what an R2T asked for, or the unsolicited data of a command (ttt noTag).
type burst struct {
	ttt         uint32
	offset, end int
	dataSN      uint32
}

// outcome is how a command ends.
type outcome struct {
	status       byte
	sense        []byte
	residual     int  // bytes
	residualFlag byte // 0x02 underflow, 0x04 overflow
}

// command takes a SCSI Command (section 11.3).
func (c *Conn) command(p *PDU) error {
	flags := p.BHS[offFlags]
	isFinal, read, write := flags&final != 0, flags&0x40 != 0, flags&0x20 != 0
	t := &task{
		c: c, itt: p.ITT(), lun: decodeLUN(p.BHS[offLUN : offLUN+8]), cdb: append([]byte(nil), p.BHS[32:48]...),
		edtl: int(p.U32(20)), read: read, iser: p.ISER,
	}
	switch {
	case t.itt == noTag:
		c.violation("SCSI Command with the reserved tag")
	case c.inUse(t.itt):
		c.violation("Initiator Task Tag %#08x is in use", t.itt)
	case read && write:
		c.violation("bidirectional command %#08x", t.itt)
	case !write && len(p.Data) > 0:
		c.violation("command %#08x is no write and has immediate data", t.itt)
	case !write && !isFinal:
		c.violation("command %#08x is no write and has no F bit", t.itt)
	case !isFinal && c.params.initialR2T:
		c.violation("command %#08x announces unsolicited data, InitialR2T is Yes", t.itt)
	case len(p.Data) > 0 && !c.params.immediateData:
		c.violation("command %#08x has immediate data, ImmediateData is No", t.itt)
	case len(p.Data) > min(c.params.first(), t.edtl):
		c.violation("command %#08x has %d bytes of immediate data", t.itt, len(p.Data))
	}
	if !write || t.edtl == 0 {
		return c.execute(t)
	}
	if t.edtl > 2*transferMax {
		c.violation("write of %d bytes", t.edtl)
		return c.respond(t, check(KeyIllegalRequest, 0x24, 0x00))
	}
	t.data = make([]byte, t.edtl)
	t.got = copy(t.data, p.Data)
	t.asked = t.got
	t.need = t.edtl
	if n := c.takes(t); n >= 0 && n < t.need {
		t.need = max(n, t.got)
	}
	c.setTask(t)
	if !isFinal {
		end := min(c.params.first(), t.edtl)
		if t.got >= end {
			c.violation("command %#08x announces unsolicited data beyond FirstBurstLength", t.itt)
		}
		t.bursts = append(t.bursts, &burst{ttt: noTag, offset: t.got, end: end})
		t.asked = end
		t.need = max(t.need, end)
	}
	return c.getOrExecute(t)
}

// getOrExecute has the rest of a write's data come, or executes the write when everything is there. Unsolicited data is waited for first.
func (c *Conn) getOrExecute(t *task) error {
	if t.got < t.need || len(t.bursts) > 0 {
		if len(t.bursts) > 0 && t.bursts[0].ttt == noTag {
			return nil
		}
		if done, err := c.link.get(c, t); !done || err != nil {
			return err
		}
	}
	c.mu.Lock()
	delete(c.tasks, t.itt)
	c.mu.Unlock()
	return c.execute(t)
}

// dataOut takes a Data-Out and judges it (section 11.7). One that is out of order ends the connection, as error recovery level 0 has it.
func (c *Conn) dataOut(p *PDU) error {
	t := c.task(p.ITT())
	if t == nil {
		c.violation("Data-Out for tag %#08x, which is not outstanding", p.ITT())
		return nil
	}
	var b *burst
	index := 0
	for i, x := range t.bursts {
		if x.ttt == p.U32(offTTT) {
			b, index = x, i
		}
	}
	if b == nil {
		c.violation("Data-Out of %#08x for Target Transfer Tag %#08x, which is not outstanding", t.itt, p.U32(offTTT))
		return nil
	}
	if index != 0 {
		c.violation("Data-Out of %#08x answers a later R2T first", t.itt)
	}
	isFinal, offset, n := p.BHS[offFlags]&final != 0, int(p.U32(offOffset)), len(p.Data)
	if p.U32(offDataSN) != b.dataSN {
		c.violation("Data-Out of %#08x: DataSN %d, expected %d", t.itt, p.U32(offDataSN), b.dataSN)
		return errors.New("Data-Out out of order")
	}
	if offset != b.offset || offset+n > b.end {
		c.violation("Data-Out of %#08x: %d bytes at %d, expected up to %d at %d", t.itt, n, offset, b.end-b.offset, b.offset)
		return errors.New("Data-Out out of order")
	}
	if isFinal != (offset+n == b.end) {
		c.violation("Data-Out of %#08x: F bit %v at %d of %d", t.itt, isFinal, offset+n, b.end)
	}
	if lun := decodeLUN(p.BHS[offLUN : offLUN+8]); b.ttt != noTag && lun != t.lun {
		c.violation("Data-Out of %#08x: LUN %d, expected %d", t.itt, lun, t.lun)
	}
	c.mu.Lock()
	if exp := p.U32(offExpStatSN); int32(exp-c.statSN) > 0 {
		defer c.violation("Data-Out of %#08x: ExpStatSN %d, the next StatSN is %d", t.itt, exp, c.statSN)
	}
	c.mu.Unlock()
	copy(t.data[offset:], p.Data)
	t.got += n
	b.offset += n
	b.dataSN++
	if b.offset == b.end {
		t.bursts = append(t.bursts[:index], t.bursts[index+1:]...)
	}
	return c.getOrExecute(t)
}

// execute carries the command out, or parks it.
func (c *Conn) execute(t *task) error {
	if p := c.target.parkFor(t); p != nil {
		c.mu.Lock()
		c.parked[t.itt] = t
		c.mu.Unlock()
		p.add(t)
		return nil
	}
	return c.carryOut(t)
}

// resume carries out a command that was parked, unless it was aborted meanwhile. Any goroutine may call it.
func (c *Conn) resume(t *task) {
	defer c.lock()()
	c.mu.Lock()
	ok := c.parked[t.itt] == t
	if ok {
		delete(c.parked, t.itt)
	}
	c.mu.Unlock()
	if ok && c.carryOut(t) != nil {
		c.Close()
	}
}

func (c *Conn) carryOut(t *task) error { return c.respond(t, c.target.run(t)) }

func (c *Conn) task(itt uint32) *task {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.tasks[itt]
}

func (c *Conn) setTask(t *task) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.tasks[t.itt] = t
}

func (c *Conn) inUse(itt uint32) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.tasks[itt] != nil || c.parked[itt] != nil
}

// respond sends the data of a command and its status, with the residual.
func (c *Conn) respond(t *task, r result) error {
	s := outcome{status: r.status, sense: r.sense}
	sent, takes := 0, len(r.in) // takes: bytes that the command itself moves, whatever the initiator expects (section 11.4.5)
	if t.read {
		sent = min(len(r.in), t.edtl)
	} else if takes = c.takes(t); takes < 0 {
		takes = t.edtl
	}
	switch {
	case takes < t.edtl:
		s.residual, s.residualFlag = t.edtl-takes, 0x02
	case takes > t.edtl:
		s.residual, s.residualFlag = takes-t.edtl, 0x04
	}
	c.advance()
	if sent > 0 {
		if done, err := c.link.put(c, t, r.in[:sent], &s); err != nil || done {
			return err
		}
	}
	p := &PDU{}
	p.BHS[0], p.BHS[offFlags], p.BHS[3] = OpSCSIResponse, final|s.residualFlag, s.status
	p.SetU32(offITT, t.itt)
	p.SetU32(offDataSN, t.dataSNs+t.r2tSN) // ExpDataSN
	p.SetU32(offResidual, uint32(s.residual))
	if len(s.sense) > 0 {
		p.Data = senseSegment(s.sense)
	}
	c.Numbers(p, true)
	return c.send(p)
}

// senseSegment is the data segment that carries sense data: its length comes first (section 11.4.7).
func senseSegment(sense []byte) []byte {
	return append([]byte{byte(len(sense) >> 8), byte(len(sense))}, sense...)
}
