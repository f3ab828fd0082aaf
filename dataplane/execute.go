package dataplane

import (
	"context"
	"errors"
	"fmt"

	"iserd.org/iserd/internal/mempool"
	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/lu"
	"iserd.org/iserd/scsi"
)

// executor runs single commands for control goroutines. It implements [lu.Executor].
type executor struct {
	p *path

	// session is one that the path does not use yet; nil: the path's own, which is waited for.
	session *iscsi.Session
}

// command is one to run. Only one of in and out may be there.
type command struct {
	lun scsi.LUN
	cdb [16]byte
	in  int    // bytes that it reads at most
	out []byte // what it writes
}

// answer is what the target said.
type answer struct {
	lu.Result
	residual int64 // bytes of in or out that were not moved; negative: the unit had that many more
}

// execution is one command under way. The reactor owns it until it sends it to done.
type execution struct {
	path   *path
	task   iscsi.Task
	pool   *mempool.Pool
	buffer mempool.Buffer
	answer answer
	done   chan *execution
	ended  bool
}

// errNoRoom says that the memory of control commands is used up.
var errNoRoom = errors.New("too many control commands at once")

// Execute runs one command that reads at most n bytes.
func (e executor) Execute(ctx context.Context, lun scsi.LUN, cdb [16]byte, n int) (lu.Result, error) {
	a, err := e.run(ctx, command{lun: lun, cdb: cdb, in: n})
	return a.Result, err
}

// run runs one command. When ctx ends first the command is aborted at the target, or not sent at all if it has not been yet; what has become of it
// is not known then.
func (e executor) run(ctx context.Context, c command) (answer, error) {
	x := &execution{path: e.p, pool: e.p.reactor.commands, done: make(chan *execution, 1)}
	e.p.reactor.Do(func() {
		n := max(c.in, len(c.out))
		buffer, ok := x.pool.Get(max(n, 1))
		if !ok {
			x.answer.Err, x.ended = errNoRoom, true
			x.done <- x
			return
		}
		x.buffer = buffer
		x.task = iscsi.Task{LUN: c.lun, CDB: c.cdb, Handler: x}
		if n > 0 {
			x.task.Direction, x.task.Data, x.task.Region = iscsi.Read, buffer.Bytes()[:n], buffer.Region().ID
		}
		if c.out != nil {
			x.task.Direction = iscsi.Write
			copy(x.task.Data, c.out)
		}
		if e.session != nil {
			e.session.Submit(&x.task)
		} else {
			e.p.Submit(&x.task)
		}
	})
	select {
	case <-x.done:
		return x.answer, x.answer.Err
	case <-e.p.reactor.done:
		return answer{}, errors.New("data plane is ending")
	case <-ctx.Done():
		// The command stays with the session until the target has confirmed its end; its memory does too.
		e.p.reactor.Do(func() {
			if !x.ended {
				e.p.giveUp(&x.task)
			}
		})
		return answer{}, fmt.Errorf("%w: no answer to SCSI command %#02x in time", iscsi.ErrTimeout, c.cdb[0])
	}
}

// TaskDone implements [iscsi.TaskHandler].
func (x *execution) TaskDone(t *iscsi.Task) {
	x.ended = true
	a := &x.answer
	switch t.Outcome {
	case iscsi.Responded:
		a.Status = t.Status
		a.Sense = append([]byte(nil), t.Sense[:t.SenseLen]...)
		if t.Status == scsi.StatusCheckCondition {
			x.path.heard(t.LUN, a.Sense)
		}
		moved := len(t.Data)
		a.residual = int64(t.Residual)
		if t.Overflow {
			a.residual = -a.residual
		} else {
			moved -= int(t.Residual)
		}
		if t.Direction == iscsi.Read {
			a.Data = append([]byte(nil), t.Data[:moved]...)
		}
	case iscsi.TargetFailed:
		a.Err = fmt.Errorf("target failure, response code %#02x", t.Response)
	case iscsi.Aborted:
		a.Err = iscsi.ErrAborted
	default:
		a.Err = iscsi.ErrSessionLost
	}
	x.pool.Put(x.buffer)
	x.done <- x
}

// giveUp ends a task of a control goroutine that does not wait for it any more. It runs on the reactor.
func (p *path) giveUp(t *iscsi.Task) {
	if p.unhold(t) {
		t.Outcome = iscsi.NotSent
		t.Handler.TaskDone(t)
		return
	}
	if p.keeper != nil {
		p.keeper.giveUp(t)
	}
}

// unhold takes a task out of those that wait for a session.
func (p *path) unhold(t *iscsi.Task) bool {
	var before *heldTask
	for h := p.held.head; h != nil; before, h = h, h.next {
		if h.task != t {
			continue
		}
		if before == nil {
			p.held.head = h.next
		} else {
			before.next = h.next
		}
		if p.held.tail == h {
			p.held.tail = before
		}
		return true
	}
	return false
}
