package testbed

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"iserd.org/iserd/internal/testbed/wire"
)

// How long a guest may take for what it does on its own account. They are generous: an emulated guest on a loaded machine is slow, and
// a guest that really hangs costs this much only once.
const (
	bootLimit     = 180 * time.Second
	answerLimit   = 120 * time.Second // without any word from the agent
	pingEvery     = 5 * time.Second
	killLimit     = 30 * time.Second // from the order to end a command to its end
	powerOffLimit = 30 * time.Second
)

// GuestConfig describes a guest. The zero value is the usual one.
type GuestConfig struct {
	CPUs      int       // virtual CPUs; 2 when 0. Count makes it 1
	MemoryMiB int       // memory; 4096 when 0
	Share     string    // folder of the host that is /host in the guest; an own one, removed by Close, when empty
	Count     bool      // guest time counts instructions, one per nanosecond (emulation with one CPU, also where KVM works)
	SystemBus bool      // start the D-Bus system bus in the guest
	Modules   []string  // kernel modules to load beyond the usual ones
	Append    string    // added to the kernel's command line
	Plugin    string    // plugin of QEMU with its arguments, as -plugin takes it; with Count only
	Console   io.Writer // gets the console as it comes; may be nil
}

// Guest is a running virtual machine. Its methods may be called from several goroutines.
type Guest struct {
	bed     *Bed
	dir     string // temporary files; removed by Close
	share   string
	kernel  string
	conn    *wire.Conn
	port    net.Conn
	console *console
	qemu    *exec.Cmd
	forget  func() bool // ends the watch over Boot's context

	lastWord atomic.Int64  // when a frame last came, Unix nanoseconds
	ready    chan struct{} // closed when the agent has prepared the guest
	dead     chan struct{} // closed when QEMU has ended
	fatal    chan struct{} // closed at the first fatal complaint

	mu       sync.Mutex
	runs     map[uint32]*execution
	lastID   uint32
	reason   string   // why the guest was ended by us; empty when it ended itself
	problems []string // of the preparation
	stderr   bytes.Buffer
	exitErr  error // of QEMU, valid once dead is closed
	closed   sync.Once
	closeErr error
}

type execution struct {
	stdout, stderr io.Writer
	exit           chan wire.Exit
}

// GuestError says that a guest failed, rather than a command in it.
type GuestError struct {
	Reason  string   // one clause
	Console []string // its last lines
}

func (e *GuestError) Error() string {
	s := "guest: " + e.Reason
	if len(e.Console) > 0 {
		s += fmt.Sprintf("; the last %d lines of its console:\n\t%s", len(e.Console), strings.Join(e.Console, "\n\t"))
	}
	return s
}

// Foreign tells whether the guest died of a fault of its kernel in what stands there for another machine or for hardware: the emulated
// adapter (rdma_rxe), the kernel's target, or the emulator itself. What was running then was cut short and says nothing about the project.
// The adapter of Linux 7.3 may come to that when its acknowledgements are late, which they are on a machine that is busy.
func (e *GuestError) Foreign() bool {
	if !strings.HasPrefix(e.Reason, kernelFailed) {
		return false
	}
	if strings.Contains(e.Reason, "Oops: int3") {
		return true
	}
	if !strings.Contains(e.Reason, "Oops: ") && !strings.Contains(e.Reason, "BUG: ") {
		return false // a task that hangs, a counter that is wrong
	}
	for _, line := range e.Console {
		if foreignFrame.MatchString(line) {
			return true
		}
	}
	return false
}

// kernelFailed begins the reason of a guest whose kernel complained of something fatal.
const kernelFailed = "its kernel failed: "

// foreignFrame matches the place of a fault and the callers in a trace of the kernel when they are not of what the project talks to; a frame
// with a question mark is a leftover on the stack. The list of all modules has no address in it.
var foreignFrame = regexp.MustCompile(`^\[[^]]*\]( RIP: \S+:| ) ?[a-z_][\w.]*\+0x[0-9a-f]+/0x[0-9a-f]+ \[(rdma_rxe|ib_isert|iscsi_target_mod|target_core_\w+)\]`)

// Boot starts a guest and returns when commands can run there. Cancelling ctx later ends the guest at once; QEMU also dies with this
// process. The caller calls Close.
//
// Errors: [*GuestError] when the guest does not come up or cannot be prepared, [*Problem] for the surroundings.
func (b *Bed) Boot(ctx context.Context, cfg GuestConfig) (*Guest, error) {
	for try := 1; ; try++ {
		g, err := b.boot(ctx, cfg)
		if try == maxBoots || !unlucky(err) {
			return g, err
		}
		b.log.printf("the emulator has let the kernel run into a breakpoint of its own; booting again")
	}
}

// maxBoots is how often a guest is booted that does not come up for a reason that is the emulator's.
const maxBoots = 3

// unlucky tells whether the kernel died of the breakpoint that it puts over an instruction while it changes it: the emulator with several processors
// runs the old translation on one of them when the breakpoint is gone already (QEMU 7.2, once in some hundred boots).
func unlucky(err error) bool {
	var guest *GuestError
	return errors.As(err, &guest) && strings.Contains(guest.Reason, "Oops: int3")
}

// boot is one attempt of Boot.
func (b *Bed) boot(ctx context.Context, cfg GuestConfig) (*Guest, error) {
	begin := time.Now()
	removeStale()
	dir, err := os.MkdirTemp("", fmt.Sprintf("%s%d-", tempPrefix, os.Getpid()))
	if err != nil {
		return nil, diskFull(err, os.TempDir())
	}
	g := &Guest{
		bed: b, dir: dir, share: cfg.Share, console: &console{copy: cfg.Console}, runs: map[uint32]*execution{},
		ready: make(chan struct{}), dead: make(chan struct{}), fatal: make(chan struct{}),
	}
	if g.share == "" {
		g.share = filepath.Join(dir, "host")
	}
	if err := os.MkdirAll(g.share, 0o755); err != nil {
		os.RemoveAll(dir)
		return nil, diskFull(err, dir)
	}
	initrd, err := b.initramfs(ctx, dir)
	if err == nil {
		err = g.startQEMU(ctx, cfg, initrd)
	}
	if err != nil {
		os.RemoveAll(dir)
		return nil, err
	}
	b.log.printf("booting the guest: kernel %s, %s", b.kernel.version, b.Accel())
	err = g.conn.SendJSON(wire.TypeSetup, 0, wire.Setup{SystemBus: cfg.SystemBus, Modules: cfg.Modules})
	if err == nil {
		err = g.waitReady(ctx)
	}
	if err != nil {
		g.end("it was given up while booting")
		g.Close()
		return nil, err
	}
	go g.runWatch(ctx)
	b.log.printf("the guest is ready after %.1f s (Linux %s)", time.Since(begin).Seconds(), g.kernel)
	return g, nil
}

// tempPrefix begins the names of guests' temporary folders; the number of the process that made it follows.
const tempPrefix = "iserd-guest-"

// removeStale removes the temporary folders of harnesses that were killed. Their guests died with them.
func removeStale() {
	dirs, _ := filepath.Glob(filepath.Join(os.TempDir(), tempPrefix+"*"))
	for _, d := range dirs {
		pid, _, _ := strings.Cut(strings.TrimPrefix(filepath.Base(d), tempPrefix), "-")
		if n, err := strconv.Atoi(pid); err == nil && errors.Is(syscall.Kill(n, 0), syscall.ESRCH) {
			os.RemoveAll(d)
		}
	}
}

// Share returns the folder of the host that the guest sees as /host.
func (g *Guest) Share() string { return g.share }

// Kernel returns the release of the guest's kernel, as uname -r prints it.
func (g *Guest) Kernel() string { return g.kernel }

// Complaints returns what the guest's kernel has said about itself so far.
func (g *Guest) Complaints() []Complaint { return g.console.all() }

// Console returns up to n last lines of the console.
func (g *Guest) Console(n int) []string { return g.console.tail(n) }

// Dead is closed when the guest has ended, for whatever reason.
func (g *Guest) Dead() <-chan struct{} { return g.dead }

// waitReady waits for the agent's answer to Setup.
func (g *Guest) waitReady(ctx context.Context) error {
	limit := time.NewTimer(bootLimit)
	defer limit.Stop()
	select {
	case <-g.ready:
		if len(g.problems) > 0 {
			return g.failure("it could not be prepared: " + strings.Join(g.problems, "; "))
		}
		return nil
	case <-g.dead:
		return g.failure("")
	case <-limit.C:
		return g.failure(fmt.Sprintf("it was not ready within %s", bootLimit))
	case <-ctx.Done():
		return ctx.Err()
	}
}

// startQEMU starts the virtual machine and the goroutines that listen to it.
func (g *Guest) startQEMU(ctx context.Context, cfg GuestConfig, initrd string) error {
	ours, theirs, err := socketPair()
	if err != nil {
		return err
	}
	defer theirs.Close()
	g.port, g.conn = ours, wire.NewConn(ours)
	r, w, err := os.Pipe()
	if err != nil {
		ours.Close()
		return err
	}
	defer w.Close()
	g.qemu = exec.Command("qemu-system-x86_64", g.arguments(cfg, initrd)...)
	g.qemu.Env = append(os.Environ(), "TMPDIR="+g.dir) // where the discarded writes go
	g.qemu.Stdout, g.qemu.Stderr = w, &g.stderr
	g.qemu.ExtraFiles = []*os.File{theirs} // descriptor 3
	// A process group of its own: an interrupt typed at the terminal is ours to act on, not QEMU's.
	g.qemu.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	g.console.fatal = func(Complaint) {
		g.mu.Lock()
		defer g.mu.Unlock()
		select {
		case <-g.fatal:
		default:
			close(g.fatal)
		}
	}
	started := make(chan error)
	consoleDone := make(chan struct{})
	go g.runQEMU(started, consoleDone)
	if err := <-started; err != nil {
		r.Close()
		ours.Close()
		return &Problem{What: "QEMU does not start", Do: "check the package qemu-system-x86", Err: err}
	}
	go func() {
		g.console.runConsole(r)
		r.Close()
		close(consoleDone)
	}()
	go g.runReceive()
	g.forget = context.AfterFunc(ctx, func() { g.end("it was cancelled") })
	return nil
}

// runQEMU starts QEMU and waits for its end. The thread that starts it must live as long: its end would be the parent's death to QEMU.
func (g *Guest) runQEMU(started chan<- error, consoleDone <-chan struct{}) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err := g.qemu.Start()
	started <- err
	if err != nil {
		return
	}
	err = g.qemu.Wait()
	g.port.Close()
	<-consoleDone
	g.mu.Lock()
	g.exitErr = err
	g.mu.Unlock()
	close(g.dead)
}

// arguments returns QEMU's command line.
func (g *Guest) arguments(cfg GuestConfig, initrd string) []string {
	cpus, memory, cpu := cfg.CPUs, cfg.MemoryMiB, "max"
	if cpus == 0 {
		cpus = 2
	}
	if memory == 0 {
		memory = 4096
	}
	// loglevel=5 shows the kernel's warnings; oops=panic and panic=-1 end a guest whose kernel cannot be trusted any more.
	cmdline := "console=ttyS0 quiet loglevel=5 panic=-1 oops=panic mitigations=off random.trust_cpu=on tsc=reliable nokaslr"
	accel := []string{"-accel", "tcg,thread=multi"}
	switch {
	case cfg.Count:
		// Without erms and fsrm the kernel copies with ordinary instructions; with them one counted instruction copies a single byte,
		// which makes each copy look eight times as dear.
		cpus, cpu = 1, "max,-erms,-fsrm"
		accel = []string{"-accel", "tcg,thread=single", "-icount", "shift=0,sleep=off"}
		cmdline += " init_on_alloc=0"
		if cfg.Plugin != "" {
			accel = append(accel, "-plugin", cfg.Plugin)
		}
	case g.bed.kvm:
		accel = []string{"-accel", "kvm"}
	}
	if cfg.Append != "" {
		cmdline += " " + cfg.Append
	}
	return append(accel,
		"-M", "q35", "-cpu", cpu, "-smp", fmt.Sprint(cpus), "-m", fmt.Sprint(memory),
		"-display", "none", "-monitor", "none", "-nic", "none", "-no-reboot",
		"-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console",
		"-kernel", g.bed.kernel.image(), "-initrd", initrd, "-append", cmdline,
		"-drive", "if=virtio,format=raw,snapshot=on,file="+escapeComma(g.bed.image),
		"-drive", "if=virtio,format=raw,readonly=on,file="+escapeComma(g.bed.kernel.modules()),
		"-virtfs", "local,mount_tag=host,security_model=none,multidevs=remap,path="+escapeComma(g.share),
		"-chardev", "socket,id=agent,fd=3", "-device", "virtio-serial-pci",
		"-device", "virtserialport,chardev=agent,name="+wire.PortName,
	)
}

// escapeComma doubles commas, which separate QEMU's options.
func escapeComma(s string) string { return strings.ReplaceAll(s, ",", ",,") }

// socketPair returns a connected pair: our end, and the file that QEMU inherits.
func socketPair() (net.Conn, *os.File, error) {
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("socketpair: %w", err)
	}
	f := os.NewFile(uintptr(fds[0]), "agent")
	defer f.Close()
	theirs := os.NewFile(uintptr(fds[1]), "qemu")
	ours, err := net.FileConn(f)
	if err != nil {
		theirs.Close()
		return nil, nil, err
	}
	return ours, theirs, nil
}

// runReceive takes the agent's frames until the guest ends.
func (g *Guest) runReceive() {
	for {
		f, err := g.conn.Receive()
		if err != nil {
			return
		}
		g.lastWord.Store(time.Now().UnixNano())
		switch f.Type {
		case wire.TypeReady:
			var r wire.Ready
			if err := f.Decode(&r); err != nil {
				r.Problems = []string{err.Error()}
			}
			g.kernel, g.problems = r.Kernel, r.Problems
			close(g.ready)
		case wire.TypeStdout, wire.TypeStderr:
			if x := g.find(f.ID); x != nil {
				w := x.stdout
				if f.Type == wire.TypeStderr {
					w = x.stderr
				}
				w.Write(f.Payload)
			}
		case wire.TypeExit:
			var e wire.Exit
			if err := f.Decode(&e); err != nil {
				e = wire.Exit{Code: 127, Error: err.Error()}
			}
			if x := g.find(f.ID); x != nil {
				x.exit <- e
			}
		}
	}
}

// runWatch ends a guest that stops answering.
func (g *Guest) runWatch(ctx context.Context) {
	t := time.NewTicker(pingEvery)
	defer t.Stop()
	for {
		select {
		case <-g.dead:
			return
		case <-ctx.Done():
			return
		case <-t.C:
			if silence := time.Since(time.Unix(0, g.lastWord.Load())); silence > answerLimit {
				g.end(fmt.Sprintf("it hung: no answer for %s", silence.Round(time.Second)))
				return
			}
			g.conn.Send(wire.TypePing, 0, nil)
		}
	}
}

func (g *Guest) find(id uint32) *execution {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.runs[id]
}

// end kills QEMU; the first reason given counts.
func (g *Guest) end(reason string) {
	g.mu.Lock()
	if g.reason == "" {
		g.reason = reason
	}
	g.mu.Unlock()
	g.qemu.Process.Kill()
}

// failure describes a guest that ended or is to be given up.
func (g *Guest) failure(reason string) *GuestError {
	select {
	case <-g.dead:
		g.mu.Lock()
		defer g.mu.Unlock()
		if g.reason != "" {
			reason = g.reason
		} else if c := fatalOf(g.console.all()); c != "" {
			reason = kernelFailed + c
		} else {
			reason = "it ended unexpectedly"
			if g.exitErr != nil {
				reason += fmt.Sprintf(" (QEMU: %v)", g.exitErr)
			}
			if s := lastLines(g.stderr.Bytes(), 3); len(s) > 0 {
				reason += ": " + strings.Join(s, "; ")
			}
		}
	default:
	}
	return &GuestError{Reason: reason, Console: g.console.tail(reportLines)}
}

// fatalOf returns the first fatal complaint, or "".
func fatalOf(cs []Complaint) string {
	for _, c := range cs {
		if c.Fatal {
			return c.Line
		}
	}
	return ""
}

// Close powers the guest off, waits for its end, and removes its temporary files. It returns an error when the guest had failed before or
// does not go down in order.
func (g *Guest) Close() error {
	g.closed.Do(func() { g.closeErr = g.powerOff() })
	return g.closeErr
}

func (g *Guest) powerOff() error {
	defer os.RemoveAll(g.dir)
	defer g.port.Close()
	defer g.forget()
	select {
	case <-g.dead:
		return g.failure("")
	default:
	}
	if err := g.conn.Send(wire.TypePowerOff, 0, nil); err != nil && !errors.Is(err, net.ErrClosed) {
		g.end("it does not listen: " + err.Error())
	}
	select {
	case <-g.dead:
	case <-time.After(powerOffLimit):
		g.end(fmt.Sprintf("it did not power off within %s", powerOffLimit))
		<-g.dead
	}
	g.mu.Lock()
	clean := g.reason == "" && g.exitErr == nil
	g.mu.Unlock()
	if clean && fatalOf(g.console.all()) == "" && g.console.contains("reboot: Power down") {
		return nil
	}
	return g.failure("")
}
