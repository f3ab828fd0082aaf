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
type executor struct{ p *path }

// execution is one command under way. The reactor owns it until it sends it to done.
type execution struct {
	task   iscsi.Task
	pool   *mempool.Pool
	buffer mempool.Buffer
	result lu.Result
	done   chan *execution
}

// Execute runs one command that reads at most n bytes.
func (e executor) Execute(ctx context.Context, lun scsi.LUN, cdb [16]byte, n int) (lu.Result, error) {
	x := &execution{pool: e.p.reactor.commands, done: make(chan *execution, 1)}
	e.p.reactor.Do(func() {
		buffer, ok := x.pool.Get(max(n, 1))
		if !ok {
			x.result.Err = errors.New("too many control commands at once")
			x.done <- x
			return
		}
		x.buffer = buffer
		x.task = iscsi.Task{LUN: lun, CDB: cdb, Handler: x}
		if n > 0 {
			x.task.Direction, x.task.Data, x.task.Region = iscsi.Read, buffer.Bytes()[:n], buffer.Region().ID
		}
		e.p.Submit(&x.task)
	})
	select {
	case <-x.done:
		return x.result, x.result.Err
	case <-e.p.reactor.done:
		return lu.Result{}, errors.New("data plane is ending")
	case <-ctx.Done():
		// The command stays with the session, which gives its memory back when it ends.
		return lu.Result{}, fmt.Errorf("%w: no answer to SCSI command %#02x in time", iscsi.ErrTimeout, cdb[0])
	}
}

// TaskDone implements [iscsi.TaskHandler].
func (x *execution) TaskDone(t *iscsi.Task) {
	switch t.Outcome {
	case iscsi.Responded:
		x.result.Status = t.Status
		x.result.Sense = append([]byte(nil), t.Sense[:t.SenseLen]...)
		moved := len(t.Data)
		if !t.Overflow {
			moved -= int(t.Residual)
		}
		x.result.Data = append([]byte(nil), t.Data[:moved]...)
	case iscsi.TargetFailed:
		x.result.Err = fmt.Errorf("target failure, response code %#02x", t.Response)
	default:
		x.result.Err = iscsi.ErrSessionLost
	}
	x.pool.Put(x.buffer)
	x.done <- x
}
