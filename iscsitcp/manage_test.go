package iscsitcp

import (
	"testing"
	"time"

	"iserd.org/iserd/internal/testtarget"
	"iserd.org/iserd/internal/testtarget/loop"
	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/iscsi/pdu"
)

// TestManageHung ends commands that a target never answers: the one that is named, then all of the unit. Their memory is free again, and nothing of
// them is left in the connection.
func TestManageHung(t *testing.T) {
	l := loop.New(t)
	target := startTarget(t, testtarget.Config{
		Keys:  map[string]string{"ImmediateData": "No"},
		Hooks: testtarget.Hooks{Received: func(c *testtarget.Conn, p *testtarget.PDU) bool { return p.Opcode() != byte(pdu.OpSCSICommand) }},
	})
	c := connect(t, l, target, nil)
	tasks := []*iscsi.Task{read10(0, make([]byte, 65536)), write10(500, make([]byte, 65536)), read10(1000, make([]byte, 512))}
	c.submit(tasks...)
	manage := func(r iscsi.TaskManagement) {
		t.Helper()
		answer := make(chan error, 1)
		l.Do(func() { c.session.Manage(r, func(err error) { answer <- err }) })
		select {
		case err := <-answer:
			if err != nil {
				t.Fatal(err)
			}
		case <-time.After(10 * time.Second):
			t.Fatal("no answer")
		}
	}
	for sent := false; !sent; { // until all have left, so that none has data on its way
		l.Call(func() {
			sent = true
			for _, k := range tasks {
				f := c.conn.find(k.ITT())
				sent = sent && f != nil && f.pending == 0
			}
		})
	}
	manage(iscsi.TaskManagement{Function: pdu.AbortTask, Task: tasks[1]})
	if k := c.wait(1)[0]; k != tasks[1] || k.Outcome != iscsi.Aborted {
		t.Fatalf("outcome %v", k.Outcome)
	}
	manage(iscsi.TaskManagement{Function: pdu.LogicalUnitReset, LUN: tasks[0].LUN})
	for _, k := range c.wait(2) {
		if k.Outcome != iscsi.Aborted {
			t.Errorf("outcome %v", k.Outcome)
		}
	}
	l.Call(func() {
		for i := range c.conn.tasks {
			if c.conn.tasks[i].t != nil {
				t.Errorf("task %d is still there", i)
			}
		}
		if n := c.session.InFlight(); n != 0 || c.session.State() != iscsi.StateLoggedIn {
			t.Errorf("%d in flight, state %v", n, c.session.State())
		}
	})
}
