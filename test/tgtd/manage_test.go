package tgtd

import (
	"errors"
	"syscall"
	"testing"
	"time"

	"iserd.org/iserd/internal/testtarget/loop"
	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/iscsi/pdu"
)

// TestTaskManagement asks for each function while commands are under way: every command ends once, by its response or by the function, and the
// session goes on. The target is held meanwhile, so that commands and function lie before it at the same time.
func TestTaskManagement(t *testing.T) {
	d, portal, _ := start(t)
	l := loop.New(t)
	c := connect(t, l, portal, config(1))
	c.ready()
	for _, f := range []pdu.TaskFunction{
		pdu.AbortTask, pdu.AbortTaskSet, pdu.ClearTaskSet, pdu.LogicalUnitReset, pdu.TargetWarmReset,
	} {
		t.Run(f.String(), func(t *testing.T) {
			if err := syscall.Kill(d.PID(), syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			var tasks []*iscsi.Task
			for i := range 16 {
				tasks = append(tasks, read(i*2048, make([]byte, 1<<20)))
			}
			c.submit(tasks...)
			answer := make(chan error, 1)
			l.Do(func() {
				c.session.Manage(iscsi.TaskManagement{Function: f, LUN: lun, Task: tasks[len(tasks)-1]}, func(err error) { answer <- err })
			})
			late := read(0, make([]byte, 512))
			c.submit(late)
			if err := syscall.Kill(d.PID(), syscall.SIGCONT); err != nil {
				t.Fatal(err)
			}
			var refused *iscsi.TaskManagementError
			select {
			case err := <-answer:
				// tgtd has no target resets; one that ABORT TASK is for may have been answered before.
				if err != nil && !errors.As(err, &refused) {
					t.Fatal(err)
				}
			case <-time.After(30 * time.Second):
				t.Fatal("no answer")
			}
			aborted := 0
			for _, k := range c.wait(len(tasks) + 1) {
				switch k.Outcome {
				case iscsi.Responded:
				case iscsi.Aborted:
					aborted++
				default:
					t.Errorf("outcome %d", k.Outcome)
				}
			}
			t.Logf("answer %v, %d of %d commands aborted", refused, aborted, len(tasks))
			if refused != nil && aborted > 0 {
				t.Error("commands were aborted although the target refused")
			}
			if late.Outcome == iscsi.Aborted {
				t.Error("a command that came after the function was aborted by it")
			}
			c.ready() // a reset leaves a unit attention
		})
	}
	c.run(read(0, make([]byte, 1<<20)))
	c.logout()
}
