package iscsi

import (
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"iserd.org/iserd/iscsi/login"
	"iserd.org/iserd/iscsi/pdu"
	"iserd.org/iserd/scsi"
)

var update = flag.Bool("update", false, "rewrite the expected output of testdata/*.txt")

// TestSessionScripts runs testdata/*.txt. A script is a list of blocks: command, "----", what the session does, blank line.
//
// What the owner does:
//
//	new [window=N] [tags=N] [ping=SECONDS] [limit=N] [unordered]  a session; CmdSN 1, StatSN 1; limit is MaxOutstandingUnexpectedPDUs of the target
//	submit NAME read|write|none [lun=N] [len=N]
//	manage FUNCTION-NUMBER [lun=N] [task=NAME]
//	tick SECONDS                                                  since the beginning
//	logout
//	closed                                                        the connection has ended
//
// What the target says, numbers as they should be unless given; window=N opens it N beyond the last CmdSN:
//
//	respond NAME [status=N] [code=N] [under=N] [over=N] [statsn=N] [window=N]
//	nop [answer] [ttt=N] [statsn=N] [window=N]                    answer: to the last ping
//	managed [result=N] [window=N]                                 to the last task management request
//	async EVENT [p2=N] [p3=N]
//	reject REASON [of=N]                                          of the PDU that was sent N before the last
//	loggedout [result=N]
func TestSessionScripts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatal("no scripts", err)
	}
	for _, name := range files {
		t.Run(strings.TrimSuffix(filepath.Base(name), ".txt"), func(t *testing.T) {
			old, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			got := (&play{t: t}).script(string(old))
			if *update {
				if err := os.WriteFile(name, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			if got != string(old) {
				a, b := strings.Split(got, "\n"), strings.Split(string(old), "\n")
				for i := range a {
					if i >= len(b) || a[i] != b[i] {
						t.Fatalf("%s:%d: got\n%s\nrun with -update and review the diff", name, i+1, strings.Join(a[i:min(i+8, len(a))], "\n"))
					}
				}
				t.Fatal("output is shorter than expected")
			}
		})
	}
}

// play is the state of one script.
type play struct {
	t     *testing.T
	s     *Session
	w     *wire
	out   strings.Builder
	sent  int // PDUs of w.sent that have been shown
	names map[*Task]string
	tasks map[string]*Task
	next  uint32 // StatSN
}

func (p *play) script(text string) string {
	var all strings.Builder
	lines := strings.Split(strings.TrimRight(text, "\n"), "\n")
	for i := 0; i < len(lines); {
		if lines[i] == "" || lines[i][0] == '#' {
			fmt.Fprintln(&all, lines[i])
			i++
			continue
		}
		command := lines[i]
		for i < len(lines) && lines[i] != "" {
			i++
		}
		fmt.Fprintf(&all, "%s\n----\n%s", command, p.run(command))
	}
	return all.String()
}

// args are the words of a command and its numbers.
type args struct {
	words   []string
	numbers map[string]int
}

func parse(command string) (a args) {
	a.numbers = map[string]int{}
	for _, w := range strings.Fields(command)[1:] {
		name, v, found := strings.Cut(w, "=")
		if n, err := strconv.Atoi(v); found && err == nil {
			a.numbers[name] = n
		} else {
			a.words = append(a.words, w)
		}
	}
	return a
}

func (a args) has(word string) bool { return slices.Contains(a.words, word) }

func (a args) number(name string, other int) int {
	if n, ok := a.numbers[name]; ok {
		return n
	}
	return other
}

func (a args) text(prefix string) string {
	for _, w := range a.words {
		if v, ok := strings.CutPrefix(w, prefix); ok {
			return v
		}
	}
	return ""
}

func (p *play) TaskDone(t *Task) {
	what := [...]string{"responded", "target failed", "lost", "not sent", "aborted"}[t.Outcome]
	fmt.Fprintf(&p.out, "   task %s: %s", p.names[t], what)
	if t.Outcome == Responded {
		fmt.Fprintf(&p.out, ", status %#02x, residual %d", uint8(t.Status), t.Residual)
	}
	p.out.WriteString("\n")
}

// run executes one command and tells what came of it.
func (p *play) run(command string) string {
	p.out.Reset()
	a := parse(command)
	verb, _, _ := strings.Cut(command, " ")
	switch verb {
	case "new":
		p.create(a)
	case "submit":
		t := &Task{LUN: scsi.NewLUN(uint16(a.number("lun", 0))), Data: make([]byte, a.number("len", 512)), Handler: p}
		switch a.words[1] {
		case "read":
			t.Direction = Read
		case "write":
			t.Direction = Write
		default:
			t.Data = nil
		}
		p.tasks[a.words[0]], p.names[t] = t, a.words[0]
		p.s.Submit(t)
	case "manage":
		f, _ := strconv.Atoi(a.words[0])
		r := TaskManagement{Function: pdu.TaskFunction(f), LUN: scsi.NewLUN(uint16(a.number("lun", 0))), Task: p.tasks[a.text("task=")]}
		p.s.Manage(r, func(err error) { fmt.Fprintf(&p.out, "   %v: %v\n", r.Function, err) })
	case "tick":
		n, _ := strconv.Atoi(a.words[0])
		if next := p.s.Tick(start.Add(time.Duration(n) * time.Second)); next.IsZero() {
			p.out.WriteString("   next tick: never\n")
		} else {
			fmt.Fprintf(&p.out, "   next tick: %v\n", next.Sub(start).Round(time.Millisecond))
		}
	case "logout":
		p.s.Logout(func(err error) { fmt.Fprintf(&p.out, "   logout: %v\n", err) })
	case "closed":
		p.s.ConnectionTerminateNotify(errors.New("connection closed"))
	default:
		p.target(verb, a)
	}
	p.s.Flush()
	for ; p.sent < len(p.w.sent); p.sent++ {
		fmt.Fprintf(&p.out, "-> %s\n", &p.w.sent[p.sent])
	}
	if p.w.ended != nil {
		fmt.Fprintf(&p.out, "   terminated: %v\n", p.w.ended)
		p.w.ended = nil
	}
	fmt.Fprintf(&p.out, "   %v, %d in flight\n", p.s.State(), p.s.InFlight())
	return p.out.String()
}

func (p *play) create(a args) {
	p.w = &wire{limits: Limits{Outstanding: controlSlots + a.number("tags", 8), MaxTransfer: 1 << 20, Unordered: a.has("unordered")}}
	p.sent, p.next, p.names, p.tasks = 0, 1, map[*Task]string{}, map[string]*Task{}
	result := &login.Result{ExpStatSN: 1, CmdSN: 1, ExpCmdSN: 1, MaxCmdSN: uint32(a.number("window", 8))}
	result.Keys.TargetMaxOutstandingUnexpected = uint32(a.number("limit", 0))
	o := Options{
		PingInterval: time.Duration(a.number("ping", 0)) * time.Second, PingTimeout: 15 * time.Second,
		Down:     func(err error) { fmt.Fprintf(&p.out, "   down: %v\n", err) },
		Rejected: func(err *RejectError) { fmt.Fprintf(&p.out, "   noted: %v\n", err) },
		Async: func(e pdu.AsyncEvent, lun scsi.LUN, data []byte) {
			fmt.Fprintf(&p.out, "   event %d of LUN %v: %x\n", e, lun, data)
		},
	}
	var err error
	if p.s, err = NewSession(p.w, result, o, start); err != nil {
		p.t.Fatal(err)
	}
}

// target is a PDU of the target.
func (p *play) target(verb string, a args) {
	var b pdu.BHS
	var data []byte
	sent := func(op pdu.Opcode) uint32 { // the tag of the last PDU of a kind
		for _, h := range slices.Backward(p.w.sent) {
			if h.Opcode() == op && h.InitiatorTaskTag() != noTag {
				return h.InitiatorTaskTag()
			}
		}
		return noTag
	}
	first, _ := strconv.Atoi(strings.Join(a.words[:min(1, len(a.words))], ""))
	advance := true
	switch verb {
	case "respond":
		r := pdu.NewSCSIResponse(&b)
		t := p.tasks[a.words[0]]
		if t == nil {
			p.t.Fatalf("no task %q; there are %v", a.words[0], slices.Sorted(maps.Keys(p.tasks)))
		}
		r.SetInitiatorTaskTag(t.ITT())
		r.SetStatus(uint8(a.number("status", 0)))
		r.SetResponse(pdu.ResponseCode(a.number("code", 0)))
		r.SetResidual(uint32(a.number("under", 0)), false)
		if n := a.number("over", 0); n > 0 {
			r.SetResidual(uint32(n), true)
		}
	case "nop":
		n := pdu.NewNOPIn(&b)
		if advance = a.has("answer"); advance {
			n.SetInitiatorTaskTag(sent(pdu.OpNOPOut))
		}
		n.SetTargetTransferTag(uint32(a.number("ttt", -1)))
	case "managed":
		pdu.NewTaskResponse(&b, pdu.TaskResult(a.number("result", 0))).SetInitiatorTaskTag(sent(pdu.OpTaskRequest))
	case "async":
		pdu.NewAsyncMessage(&b, pdu.AsyncEvent(first)).SetParameters(0, uint16(a.number("p2", 0)), uint16(a.number("p3", 0)))
	case "reject":
		pdu.NewReject(&b, pdu.RejectReason(first))
		data = p.w.sent[len(p.w.sent)-1-a.number("of", 0)][:]
	case "loggedout":
		pdu.NewLogoutResponse(&b, pdu.LogoutResult(a.number("result", 0))).SetInitiatorTaskTag(sent(pdu.OpLogoutRequest))
	default:
		p.t.Fatalf("unknown command %q", verb)
	}
	b.SetStatSN(uint32(a.number("statsn", int(p.next))))
	if advance {
		p.next++
	}
	b.SetExpCmdSN(p.s.cmdSN)
	b.SetMaxCmdSN(p.s.window.MaxCmdSN)
	if n, ok := a.numbers["window"]; ok {
		b.SetMaxCmdSN(p.s.cmdSN + uint32(n) - 1)
	}
	b.SetDataSegmentLength(len(data))
	p.s.ControlNotify(&b, data)
}
