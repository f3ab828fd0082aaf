package testtarget

import "errors"

// transfer is one SCSI command on its way through the target. A write stays in Conn.tasks until all of its data has come:
//
//	command -> unsolicited Data-Out ... F -> R2T -> Data-Out ... F -> R2T -> ... -> execute -> Data-In ... -> response
type transfer struct {
	c       *Conn
	itt     uint32
	lun     int
	cdb     []byte
	edtl    int
	read    bool
	data    []byte // of a write
	got     int    // bytes that have come
	asked   int    // bytes that came unsolicited or were asked for
	need    int    // bytes that the command takes
	r2tSN   uint32
	bursts  []*burst
	dataSNs uint32 // Data-In PDUs sent
}

// burst is a sequence of Data-Out PDUs: what an R2T asked for, or the unsolicited data of a command (ttt noTag).
type burst struct {
	ttt         uint32
	offset, end int
	dataSN      uint32
}

// command takes a SCSI Command (section 11.3).
func (c *Conn) command(p *PDU) error {
	flags := p.BHS[offFlags]
	isFinal, read, write := flags&final != 0, flags&0x40 != 0, flags&0x20 != 0
	t := &transfer{
		c: c, itt: p.ITT(), lun: decodeLUN(p.BHS[offLUN : offLUN+8]), cdb: append([]byte(nil), p.BHS[32:48]...),
		edtl: int(p.U32(20)), read: read,
	}
	switch {
	case t.itt == noTag:
		c.violation("SCSI Command with the reserved tag")
	case c.tasks[t.itt] != nil:
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
	if t.edtl > maxDataSegment {
		c.violation("write of %d bytes", t.edtl)
		return c.respond(t, nil, statusCheck, senseIllegal(0x24, 0))
	}
	t.data = make([]byte, t.edtl)
	t.got = copy(t.data, p.Data)
	t.asked = t.got
	t.need = t.edtl
	if n := dataOutLength(c.unit(t.lun), t.cdb); n >= 0 && n < t.need {
		t.need = max(n, t.got)
	}
	c.tasks[t.itt] = t
	if !isFinal {
		end := min(c.params.first(), t.edtl)
		if t.got >= end {
			c.violation("command %#08x announces unsolicited data beyond FirstBurstLength", t.itt)
		}
		t.bursts = append(t.bursts, &burst{ttt: noTag, offset: t.got, end: end})
		t.asked = end
		t.need = max(t.need, end)
	}
	return c.askOrExecute(t)
}

// askOrExecute sends the R2Ts that may be outstanding, or executes the write when everything has come. Unsolicited data is waited for first.
func (c *Conn) askOrExecute(t *transfer) error {
	if len(t.bursts) == 0 && t.got >= t.need {
		delete(c.tasks, t.itt)
		return c.execute(t)
	}
	if len(t.bursts) > 0 && t.bursts[0].ttt == noTag {
		return nil
	}
	for len(t.bursts) < c.params.maxOutstandingR2T && t.asked < t.need {
		n := min(c.params.maxBurst, t.need-t.asked)
		c.ttt++
		b := &burst{ttt: c.ttt, offset: t.asked, end: t.asked + n}
		t.bursts = append(t.bursts, b)
		t.asked += n
		r := &PDU{}
		r.BHS[0], r.BHS[offFlags] = opR2T, final
		encodeLUN(r.BHS[offLUN:], t.lun)
		r.SetU32(offITT, t.itt)
		r.SetU32(offTTT, b.ttt)
		r.SetU32(offDataSN, t.r2tSN)
		r.SetU32(offOffset, uint32(b.offset))
		r.SetU32(offResidual, uint32(n)) // Desired Data Transfer Length
		t.r2tSN++
		c.Numbers(r, false)
		if err := c.send(r); err != nil {
			return err
		}
	}
	return nil
}

// dataOut takes a Data-Out and judges it (section 11.7). One that is out of order ends the connection, as error recovery level 0 has it.
func (c *Conn) dataOut(p *PDU) error {
	t := c.tasks[p.ITT()]
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
	return c.askOrExecute(t)
}

// execute lets the unit run the command and sends its data and status.
func (c *Conn) execute(t *transfer) error {
	var in []byte
	status, sense := byte(0), []byte(nil)
	if u := c.unit(t.lun); u != nil && u.Fault != nil {
		if s, b := u.Fault(t.cdb); s != 0 {
			return c.respond(t, nil, s, b)
		}
	}
	in, status, sense = c.target.run(t.lun, t.cdb, t.data)
	return c.respond(t, in, status, sense)
}

// respond sends Data-In and the response, with the residual.
func (c *Conn) respond(t *transfer, in []byte, status byte, sense []byte) error {
	sent, residual, residualFlag := 0, 0, byte(0)
	takes := len(in) // bytes that the command itself moves, whatever the initiator expects (section 11.4.5)
	if t.read {
		sent = min(len(in), t.edtl)
	} else if takes = dataOutLength(c.unit(t.lun), t.cdb); takes < 0 {
		takes = t.edtl
	}
	switch {
	case takes < t.edtl:
		residual, residualFlag = t.edtl-takes, 0x02
	case takes > t.edtl:
		residual, residualFlag = takes-t.edtl, 0x04
	}
	c.mu.Lock()
	c.maxCmdSN++
	c.mu.Unlock()
	withStatus := t.read && sent > 0 && status == 0 && !c.target.config.SeparateStatus
	if t.read {
		if err := c.sendDataIn(t, in[:sent], withStatus, status, residual, residualFlag); err != nil || withStatus {
			return err
		}
	}
	r := &PDU{}
	r.BHS[0], r.BHS[offFlags], r.BHS[3] = opSCSIResponse, final|residualFlag, status
	r.SetU32(offITT, t.itt)
	r.SetU32(offDataSN, t.dataSNs+t.r2tSN) // ExpDataSN
	r.SetU32(offResidual, uint32(residual))
	if len(sense) > 0 {
		r.Data = append([]byte{byte(len(sense) >> 8), byte(len(sense))}, sense...)
	}
	c.Numbers(r, true)
	return c.send(r)
}

func (c *Conn) sendDataIn(t *transfer, in []byte, withStatus bool, status byte, residual int, residualFlag byte) error {
	size := c.params.sendMax
	if s := c.target.config.DataInSize; s > 0 && s < size {
		size = s
	}
	for off := 0; off < len(in); {
		toBurst := c.params.maxBurst - off%c.params.maxBurst
		n := min(size, len(in)-off, toBurst)
		p := &PDU{Data: in[off : off+n]}
		p.BHS[0] = opDataIn
		p.SetU32(offITT, t.itt)
		p.SetU32(offTTT, noTag)
		p.SetU32(offDataSN, t.dataSNs)
		p.SetU32(offOffset, uint32(off))
		t.dataSNs++
		off += n
		last := off == len(in)
		if last || n == toBurst {
			p.BHS[offFlags] = final
		}
		if last && withStatus {
			p.BHS[offFlags] |= 0x01 | residualFlag
			p.BHS[3] = status
			p.SetU32(offResidual, uint32(residual))
			c.Numbers(p, true)
		} else {
			c.Numbers(p, false)
			p.SetU32(offCmdSN, 0) // StatSN is reserved without status
		}
		if err := c.send(p); err != nil {
			return err
		}
	}
	return nil
}
