package tgtd

import (
	"fmt"
	"testing"
	"time"

	"iserd.org/iserd/internal/testtarget/loop"
	"iserd.org/iserd/iscsi"
)

// pump keeps tasks in flight: each one that ends is submitted again until n have ended. It runs on the loop.
type pump struct {
	session *iscsi.Session
	left    int
	flying  int
	bad     int
	done    chan struct{}
}

// TaskDone implements iscsi.TaskHandler.
func (p *pump) TaskDone(t *iscsi.Task) {
	if t.Outcome != iscsi.Responded || t.Status != 0 {
		p.bad++
	}
	if p.left > 0 && p.bad == 0 {
		p.left--
		p.session.Submit(t)
		return
	}
	if p.flying--; p.flying == 0 {
		close(p.done)
	}
}

// BenchmarkTransfers moves data to and from tgtd with several commands in flight. Besides the time, which is mostly tgtd's and the
// kernel's, it counts what the initiator asks of the kernel: operations on the ring and system calls per command.
func BenchmarkTransfers(b *testing.B) {
	for _, op := range []string{"read", "write"} {
		for _, size := range []int{4096, 65536, 524288} {
			for _, depth := range []int{1, 32} {
				b.Run(fmt.Sprintf("%s/%dk/depth%d", op, size>>10, depth), func(b *testing.B) { benchmark(b, op, size, depth) })
			}
		}
	}
}

func benchmark(b *testing.B, op string, size, depth int) {
	_, portal, _ := start(b)
	l := loop.New(b)
	c := connect(b, l, portal, config(1))
	c.ready()
	p := &pump{session: c.session, left: b.N - depth, flying: min(depth, b.N), done: make(chan struct{})}
	var tasks []*iscsi.Task
	for i := range p.flying {
		t := read(i*size/512, make([]byte, size))
		if op == "write" {
			t = write(i*size/512, make([]byte, size))
		}
		t.Handler, t.LUN = p, lun
		tasks = append(tasks, t)
	}
	var enters, sqes uint64
	l.Call(func() { enters, sqes = l.Ring.Enters, l.Ring.SQEs })
	b.SetBytes(int64(size))
	b.ResetTimer()
	began := time.Now()
	l.Do(func() {
		for _, t := range tasks {
			c.session.Submit(t)
		}
	})
	<-p.done
	b.ReportMetric(float64(b.N)/time.Since(began).Seconds(), "IOPS")
	b.StopTimer()
	l.Call(func() { enters, sqes = l.Ring.Enters-enters, l.Ring.SQEs-sqes })
	b.ReportMetric(float64(enters)/float64(b.N), "enters/op")
	b.ReportMetric(float64(sqes)/float64(b.N), "sqes/op")
	if p.bad > 0 {
		b.Errorf("%d commands failed", p.bad)
	}
	c.logout()
}
