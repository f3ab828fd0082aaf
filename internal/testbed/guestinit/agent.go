package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/internal/testbed/wire"
)

// Time given to a command that is being ended: first to print where it hangs, as Go programs do on SIGQUIT, then to let go of its pipes.
const (
	quitGrace = 3 * time.Second
	pipeGrace = 5 * time.Second
)

// agent executes the host's commands. Each command runs in a control group of its own, so that whatever it started ends with it.
type agent struct {
	conn *wire.Conn

	mu       sync.Mutex
	commands map[uint32]*command
}

type command struct {
	id    uint32
	cmd   *exec.Cmd
	group string // folder of its control group
	input chan []byte
	ended chan struct{}
}

// runAgent serves the host until it asks to power off or goes away. Returning ends the guest.
func runAgent() error {
	port, err := openPort(wire.PortName)
	if err != nil {
		return err
	}
	a := &agent{conn: wire.NewConn(port), commands: map[uint32]*command{}}
	for {
		f, err := a.conn.Receive()
		if err != nil {
			return fmt.Errorf("read from the host: %w", err)
		}
		switch f.Type {
		case wire.TypeSetup:
			var s wire.Setup
			if err := f.Decode(&s); err != nil {
				return err
			}
			if err := a.conn.SendJSON(wire.TypeReady, 0, prepare(s)); err != nil {
				return err
			}
		case wire.TypeStart:
			var s wire.Start
			if err := f.Decode(&s); err != nil {
				return err
			}
			a.start(f.ID, s)
		case wire.TypeInput:
			if c := a.find(f.ID); c != nil {
				select {
				case c.input <- f.Payload:
				case <-c.ended:
				}
			}
		case wire.TypeKill:
			if c := a.find(f.ID); c != nil {
				go c.kill()
			}
		case wire.TypePing:
			if err := a.conn.Send(wire.TypePong, 0, nil); err != nil {
				return err
			}
		case wire.TypePowerOff:
			return nil
		}
	}
}

// openPort finds the virtio-serial port by its name; without udev nothing makes the usual symbolic link.
func openPort(name string) (*os.File, error) {
	if err := run("modprobe", "virtio_console"); err != nil {
		return nil, err
	}
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		files, err := filepath.Glob("/sys/class/virtio-ports/*/name")
		if err != nil {
			return nil, err
		}
		for _, f := range files {
			if b, err := os.ReadFile(f); err == nil && strings.TrimSpace(string(b)) == name {
				return os.OpenFile("/dev/"+filepath.Base(filepath.Dir(f)), os.O_RDWR, 0)
			}
		}
		if time.Now().After(end) {
			return nil, fmt.Errorf("no virtio-serial port is named %s", name)
		}
	}
}

func (a *agent) find(id uint32) *command {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.commands[id]
}

// start begins a command; its end, or the failure to begin, is reported by an Exit frame.
func (a *agent) start(id uint32, s wire.Start) {
	c := &command{id: id, input: make(chan []byte, 16), ended: make(chan struct{}), group: fmt.Sprintf("/sys/fs/cgroup/command-%d", id)}
	outputs, err := c.begin(s)
	if err != nil {
		os.Remove(c.group)
		a.exit(id, wire.Exit{Code: 127, Error: err.Error()})
		return
	}
	a.mu.Lock()
	a.commands[id] = c
	a.mu.Unlock()
	go a.runCommand(c, outputs)
}

// begin starts the process and returns the reading ends of its standard output and error; the second is nil when they are one.
func (c *command) begin(s wire.Start) ([2]*os.File, error) {
	var outputs [2]*os.File
	if len(s.Args) == 0 {
		return outputs, errors.New("no command given")
	}
	if err := os.Mkdir(c.group, 0o755); err != nil {
		return outputs, err
	}
	group, err := os.Open(c.group)
	if err != nil {
		return outputs, err
	}
	defer group.Close()
	c.cmd = exec.Command(s.Args[0], s.Args[1:]...)
	c.cmd.Env = append(os.Environ(), s.Env...)
	c.cmd.Dir = s.Dir
	if c.cmd.Dir == "" {
		c.cmd.Dir = "/tmp"
	}
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, UseCgroupFD: true, CgroupFD: int(group.Fd())}
	var writers []*os.File
	pipe := func() (r, w *os.File, err error) {
		r, w, err = os.Pipe()
		writers = append(writers, w)
		return r, w, err
	}
	defer func() {
		for _, w := range writers {
			w.Close()
		}
	}()
	var w *os.File
	if outputs[0], w, err = pipe(); err != nil {
		return outputs, err
	}
	c.cmd.Stdout, c.cmd.Stderr = w, w
	if !s.Merge {
		if outputs[1], w, err = pipe(); err != nil {
			return outputs, err
		}
		c.cmd.Stderr = w
	}
	stdin, err := c.cmd.StdinPipe()
	if err != nil {
		return outputs, err
	}
	if err := c.cmd.Start(); err != nil {
		return outputs, err
	}
	go c.runInput(stdin)
	return outputs, nil
}

// runInput feeds standard input until the host closes it or the command ends.
func (c *command) runInput(stdin io.WriteCloser) {
	defer stdin.Close()
	for {
		select {
		case b := <-c.input:
			if len(b) == 0 {
				return
			}
			if _, err := stdin.Write(b); err != nil {
				return
			}
		case <-c.ended:
			return
		}
	}
}

// runCommand forwards the output, waits for the end, clears away what was left running, and reports.
func (a *agent) runCommand(c *command, outputs [2]*os.File) {
	var forward sync.WaitGroup
	for i, t := range []wire.Type{wire.TypeStdout, wire.TypeStderr} {
		if r := outputs[i]; r != nil {
			forward.Go(func() {
				defer r.Close()
				buf := make([]byte, 32<<10)
				for {
					n, err := r.Read(buf)
					if n > 0 && a.conn.Send(t, c.id, buf[:n]) != nil || err != nil {
						return
					}
				}
			})
		}
	}
	err := c.cmd.Wait()
	exit := wire.Exit{Code: c.cmd.ProcessState.ExitCode()}
	if ws, ok := c.cmd.ProcessState.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		exit.Code = 128 + int(ws.Signal())
	} else if err != nil && exit.Code < 0 {
		exit.Code, exit.Error = 127, err.Error()
	}
	exit.Leftover = c.leftover()
	c.killGroup()
	done := make(chan struct{})
	go func() { forward.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(pipeGrace): // a process that cannot die holds a pipe
		for _, r := range outputs {
			if r != nil {
				r.SetReadDeadline(time.Now())
			}
		}
		<-done
	}
	os.Remove(c.group)
	a.mu.Lock()
	delete(a.commands, c.id)
	a.mu.Unlock()
	close(c.ended)
	a.exit(c.id, exit)
}

func (a *agent) exit(id uint32, e wire.Exit) {
	if err := a.conn.SendJSON(wire.TypeExit, id, e); err != nil {
		fmt.Fprintf(os.Stderr, "testbed: report exit of command %d: %v\n", id, err)
	}
}

// kill ends a command that took too long. The kernel's list of blocked tasks goes to the console, and SIGQUIT makes a Go program print
// its goroutines, so that the report shows where it hung.
func (c *command) kill() {
	if err := os.WriteFile("/proc/sysrq-trigger", []byte("w"), 0); err != nil {
		fmt.Fprintf(os.Stderr, "testbed: %v\n", err)
	}
	unix.Kill(c.cmd.Process.Pid, unix.SIGQUIT)
	select {
	case <-c.ended:
	case <-time.After(quitGrace):
		c.killGroup()
	}
}

func (c *command) killGroup() {
	if err := os.WriteFile(c.group+"/cgroup.kill", []byte("1"), 0); err != nil && !errors.Is(err, os.ErrNotExist) {
		fmt.Fprintf(os.Stderr, "testbed: %v\n", err)
	}
}

// leftover names the processes still in the command's group.
func (c *command) leftover() []string {
	b, err := os.ReadFile(c.group + "/cgroup.procs")
	if err != nil {
		return nil
	}
	var names []string
	for _, s := range strings.Fields(string(b)) {
		pid, err := strconv.Atoi(s)
		if err != nil || pid == 0 {
			continue
		}
		comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
		if err != nil {
			continue
		}
		names = append(names, fmt.Sprintf("%s[%d]", strings.TrimSpace(string(comm)), pid))
	}
	return names
}
