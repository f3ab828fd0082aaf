package iscsitcp

import (
	"bytes"
	"errors"
	"testing"
	"time"

	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/iscsi/login"
	"iserd.org/iserd/iscsi/pdu"
	"iserd.org/iserd/scsi"
)

// streamMover is a connection without a socket as a Datamover: its end is what the test makes of it.
type streamMover struct {
	*Conn
	ended error
}

func (m *streamMover) EnableDatamover(n iscsi.Notifier) error { m.notifier = n; return nil }
func (m *streamMover) Flush() error                           { return nil }
func (m *streamMover) Received() uint64                       { return m.bytesIn }
func (m *streamMover) ConnectionTerminate(err error) {
	if m.state == up {
		m.state, m.ended = closing, err
	}
}

// DeallocateTaskResources is that of Conn, which would use the ring to end the connection.
func (m *streamMover) DeallocateTaskResources(t *iscsi.Task) error {
	if k := m.find(t.ITT()); k != nil && k.t == t && (k.pending > 0 || m.in.task == k) {
		err := errors.New("data is moving")
		m.ConnectionTerminate(err)
		return err
	}
	return m.Conn.DeallocateTaskResources(t)
}

type stackHandler struct{ done map[*iscsi.Task]int }

func (h *stackHandler) TaskDone(t *iscsi.Task) { h.done[t]++ }

// FuzzStack is FuzzReceive with a session on top: any bytes of a target, in any pieces, while commands and task management are under way. Each command
// comes back once, its memory untouched from then on, and nothing beside it is ever written.
func FuzzStack(f *testing.F) {
	lun := uint64(scsi.NewLUN(1))
	w := &wire{keys: defaultSettings}
	w.dataIn(0, 0, 0, make([]byte, 100), false)
	w.nopIn([]byte("ping"))
	w.dataIn(0, 1, 100, make([]byte, 412), true)
	w.r2t(1, 7, 0, 8192, 7808)
	f.Add(w.b, uint16(11), byte(0))
	f.Add(w.b, uint16(65535), byte(1))
	var h pdu.BHS
	r := pdu.NewTaskResponse(&h, pdu.TaskFunctionComplete)
	r.SetInitiatorTaskTag(1<<16 | 6 + 2 + uint32(pdu.LogicalUnitReset))
	r.SetStatSN(5)
	w = &wire{keys: defaultSettings}
	w.pdu(&h, nil)
	f.Add(w.b, uint16(100), byte(pdu.LogicalUnitReset))
	const canary, margin = 0xa5, 64
	f.Fuzz(func(t *testing.T, stream []byte, piece uint16, function byte) {
		if len(stream) > 5000*(int(piece)+1) || len(stream) > 1<<16 {
			t.Skip("too long to be quick")
		}
		c, _ := newStream(t, defaultSettings)
		defer c.mem.close()
		c.tasks = make([]task, 16)
		c.out.init(c.mem, len(c.tasks), 1)
		mover := &streamMover{Conn: c}
		result := &login.Result{ExpStatSN: 5, CmdSN: 6, ExpCmdSN: 6, MaxCmdSN: 20}
		downs := 0
		session, err := iscsi.NewSession(mover, result, iscsi.Options{Down: func(error) { downs++ }}, time.Unix(1000, 0))
		if err != nil {
			t.Fatal(err)
		}
		handler := &stackHandler{map[*iscsi.Task]int{}}
		sizes := []int{512, 16000, 40000}
		var memory [][]byte
		var tasks []*iscsi.Task
		for i, n := range sizes {
			m := bytes.Repeat([]byte{canary}, n+2*margin)
			memory = append(memory, m)
			k := &iscsi.Task{LUN: scsi.LUN(lun), Direction: iscsi.Read, Data: m[margin : margin+n : margin+n], Handler: handler}
			if i == 1 {
				k.Direction = iscsi.Write
			}
			tasks = append(tasks, k)
			session.Submit(k)
		}
		asked, answered := 0, 0
		if fn := pdu.TaskFunction(function % 8); fn != 0 {
			asked++
			session.Manage(iscsi.TaskManagement{Function: fn, LUN: scsi.LUN(lun), Task: tasks[0]}, func(error) { answered++ })
		}
		// What a task holds when it comes back is what it holds at the end.
		final := make([][]byte, len(tasks))
		look := func() {
			for i, k := range tasks {
				if handler.done[k] > 0 && final[i] == nil {
					final[i] = bytes.Clone(memory[i])
				}
			}
		}
		drain(c, 1<<20)
		err = feed(c, stream, func(most int) int {
			look()
			drain(c, 10000)
			return min(most, int(piece)+1)
		})
		look()
		session.Terminate(errors.Join(err, errors.New("end of the stream")))
		session.ConnectionTerminateNotify(errors.New("gone"))
		look()
		for i, m := range memory {
			if handler.done[tasks[i]] != 1 {
				t.Fatalf("task %d came back %d times", i, handler.done[tasks[i]])
			}
			if !bytes.Equal(m, final[i]) {
				t.Fatalf("the memory of task %d was written after it came back", i)
			}
			for _, b := range [][]byte{m[:margin], m[margin+sizes[i]:]} {
				if bytes.Count(b, []byte{canary}) != len(b) {
					t.Fatalf("memory beside task %d was written", i)
				}
			}
		}
		if asked != answered || downs != 1 {
			t.Fatalf("%d of %d questions answered, %d ends", answered, asked, downs)
		}
	})
}
