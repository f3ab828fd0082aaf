package targets

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Programs are tgt's two programs and the environment they need. The zero value takes them from PATH.
type Programs struct {
	Tgtd, Tgtadm string
	Env          []string // NAME=value
}

// TGTDConfig describes a tgtd with one target.
type TGTDConfig struct {
	Programs   Programs
	Name       string         // iSCSI name
	Portal     netip.AddrPort // for TCP any free port; for iSER the port must be 3260
	ISER       bool           // the target is reached over iSER only, else over TCP only
	Units      []Unit         // unit i has LUN i+1
	Initiators []string       // names that may log in; required over iSER. Empty admits everyone over TCP
}

// TGTTarget is a further target of a tgtd, see [TGTD.Add].
type TGTTarget struct {
	Name       string
	Units      []Unit         // unit i has LUN i+1
	Initiators []string       // as in TGTDConfig
	CHAP       *CHAP          // whom it admits; everyone when nil
	Redirect   netip.AddrPort // sends initiators to this portal, for the time being; does not when zero
}

// CHAP holds the secrets of a login (RFC 7143 section 13.11). Secrets of 12 to 16 bytes suit every target.
type CHAP struct {
	User, Secret             string // of the initiator
	TargetUser, TargetSecret string // of the target, for mutual authentication; empty without
}

// tgtPort is the only port on which tgtd serves iSER.
const tgtPort = 3260

// TGTD is a running tgtd. Name, LUNs and Sessions speak of its first target. Its methods may be called from several goroutines.
type TGTD struct {
	cfg  TGTDConfig
	dir  string // socket of the daemon, and files of ramdisks
	cmd  *exec.Cmd
	dead chan struct{}

	mu      sync.Mutex
	log     bytes.Buffer // what the daemon printed
	targets int          // how many were made; the last one's tid

	closing sync.Once
}

// StartTGTD starts a tgtd of its own, beside any other, and returns when its target takes logins. The daemon dies with this process.
//
// Errors hold what tgtd or tgtadm printed.
func StartTGTD(ctx context.Context, cfg TGTDConfig) (*TGTD, error) {
	if cfg.ISER && cfg.Portal.Port() != tgtPort {
		return nil, fmt.Errorf("tgtd: iSER on port %d: it serves iSER on port %d only", cfg.Portal.Port(), tgtPort)
	}
	if cfg.ISER && len(cfg.Initiators) == 0 {
		return nil, errors.New("tgtd: over iSER it admits named initiators only, and none is named")
	}
	if cfg.Programs.Tgtd == "" {
		cfg.Programs.Tgtd, cfg.Programs.Tgtadm = "tgtd", "tgtadm"
	}
	dir, err := os.MkdirTemp("", "tgtd-")
	if err != nil {
		return nil, err
	}
	t := &TGTD{cfg: cfg, dir: dir, dead: make(chan struct{})}
	// The pool is pinned memory; the default is 1 GiB.
	t.cmd = exec.Command(cfg.Programs.Tgtd, "-f", "--iser", "pool_sz_mb=128", "--iscsi", "portal="+cfg.Portal.String())
	t.cmd.Env = t.environ()
	t.cmd.Stdout, t.cmd.Stderr = (*logWriter)(t), (*logWriter)(t)
	t.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	started := make(chan error)
	go t.runDaemon(started)
	if err := <-started; err != nil {
		os.RemoveAll(dir)
		return nil, fmt.Errorf("tgtd: %w", err)
	}
	if err := t.setUp(ctx); err != nil {
		t.Close()
		return nil, err
	}
	return t, nil
}

// Name returns the target's iSCSI name.
func (t *TGTD) Name() string { return t.cfg.Name }

// LUNs returns how many units the target has: they have the numbers 1 to LUNs.
func (t *TGTD) LUNs() int { return len(t.cfg.Units) }

// PID returns the daemon's process number, to stop or kill it.
func (t *TGTD) PID() int { return t.cmd.Process.Pid }

// Log returns what the daemon has printed.
func (t *TGTD) Log() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.log.String()
}

// Sessions returns how many sessions the target has.
func (t *TGTD) Sessions() (int, error) {
	out, err := t.admin(context.Background(), "--mode", "target", "--op", "show")
	if err != nil {
		return 0, err
	}
	return countSessions(out, t.cfg.Name), nil
}

// countSessions counts the I_T nexuses of a target in what "tgtadm --mode target --op show" prints.
func countSessions(out, name string) int {
	n, inside := 0, false
	for _, line := range strings.Split(out, "\n") {
		if f := strings.Fields(line); strings.HasPrefix(line, "Target ") && len(f) == 3 {
			inside = f[2] == name
		} else if inside && strings.HasPrefix(strings.TrimSpace(line), "I_T nexus: ") {
			n++
		}
	}
	return n
}

// Close kills the daemon, which ends its sessions without a word, and removes what was made for ramdisks. It is idempotent.
func (t *TGTD) Close() error {
	t.closing.Do(func() {
		t.cmd.Process.Kill()
		<-t.dead
		os.RemoveAll(t.dir)
	})
	return nil
}

// runDaemon starts tgtd and waits for its end on one thread, whose death would be the parent's death to tgtd.
func (t *TGTD) runDaemon(started chan<- error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err := t.cmd.Start()
	started <- err
	if err != nil {
		return
	}
	t.cmd.Wait()
	close(t.dead)
}

// environ gives the daemon a socket of its own, so that several can run.
func (t *TGTD) environ() []string {
	env := append(os.Environ(), t.cfg.Programs.Env...)
	return append(env, "TGT_IPC_SOCKET="+filepath.Join(t.dir, "socket"))
}

// setUp waits for the daemon and makes the target.
func (t *TGTD) setUp(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	for {
		if _, err := t.admin(ctx, "--mode", "sys", "--op", "show"); err == nil {
			break
		}
		select {
		case <-t.dead:
			return fmt.Errorf("tgtd: it ended at once: %s", strings.TrimSpace(t.Log()))
		case <-ctx.Done():
			return fmt.Errorf("tgtd: it does not answer: %w: %s", ctx.Err(), strings.TrimSpace(t.Log()))
		case <-time.After(20 * time.Millisecond):
		}
	}
	return t.Add(ctx, TGTTarget{Name: t.cfg.Name, Units: t.cfg.Units, Initiators: t.cfg.Initiators})
}

// Add makes another target in the daemon, at the same portal and over the same transport.
func (t *TGTD) Add(ctx context.Context, target TGTTarget) error {
	t.mu.Lock()
	t.targets++
	tid := strconv.Itoa(t.targets)
	t.mu.Unlock()
	steps := [][]string{{"--mode", "target", "--op", "new", "--tid", tid, "-T", target.Name}}
	for i, u := range target.Units {
		lun := strconv.Itoa(i + 1)
		path := u.Path
		switch u.Kind {
		case Ramdisk:
			path = filepath.Join(t.dir, "unit-"+tid+"-"+lun)
			fallthrough
		case FileIO:
			if err := ensureFile(path, u.Size); err != nil {
				return fmt.Errorf("tgtd: lun %s: %w", lun, err)
			}
		default:
			return fmt.Errorf("tgtd: lun %s: kind %q is not supported", lun, u.Kind)
		}
		create := []string{"--mode", "logicalunit", "--op", "new", "--tid", tid, "--lun", lun, "-b", path}
		if u.BlockSize != 0 {
			create = append(create, "--blocksize", strconv.Itoa(u.BlockSize))
		}
		params := "scsi_sn=" + u.serial(target.Name, i+1)
		if u.Product != "" {
			params += ",product_id=" + u.Product
		}
		steps = append(steps, create, []string{"--mode", "logicalunit", "--op", "update", "--tid", tid, "--lun", lun, "--params", params})
	}
	if c := target.CHAP; c != nil {
		steps = append(steps, []string{"--mode", "account", "--op", "new", "--user", c.User, "--password", c.Secret},
			[]string{"--mode", "account", "--op", "bind", "--tid", tid, "--user", c.User})
		if c.TargetUser != "" {
			steps = append(steps, []string{"--mode", "account", "--op", "new", "--user", c.TargetUser, "--password", c.TargetSecret},
				[]string{"--mode", "account", "--op", "bind", "--tid", tid, "--user", c.TargetUser, "--outgoing"})
		}
	}
	if r := target.Redirect; r.IsValid() {
		for _, nv := range [][2]string{{"RedirectAddress", r.Addr().String()}, {"RedirectPort", strconv.Itoa(int(r.Port()))}, {"RedirectReason", "Temporary"}} {
			steps = append(steps, []string{"--mode", "target", "--op", "update", "--tid", tid, "--name", nv[0], "--value", nv[1]})
		}
	}
	steps = append(steps, []string{"--mode", "target", "--op", "bind", "--tid", tid, "-I", "ALL"})
	for _, name := range target.Initiators {
		steps = append(steps, []string{"--mode", "target", "--op", "bind", "--tid", tid, "--initiator-name", name})
	}
	for _, s := range steps {
		if _, err := t.admin(ctx, s...); err != nil {
			return err
		}
	}
	return nil
}

// admin runs tgtadm against this daemon.
func (t *TGTD) admin(ctx context.Context, args ...string) (string, error) {
	lld := "iscsi"
	if t.cfg.ISER {
		lld = "iser"
	}
	cmd := exec.CommandContext(ctx, t.cfg.Programs.Tgtadm, append([]string{"--lld", lld}, args...)...)
	cmd.Env = t.environ()
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("tgtadm %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(errs.String()))
	}
	return out.String(), nil
}

// logWriter collects what the daemon prints.
type logWriter TGTD

func (w *logWriter) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.log.Write(b)
}
