package testbed

import (
	"bufio"
	"io"
	"regexp"
	"strings"
	"sync"
)

// Complaint is a message of the guest's kernel about itself.
type Complaint struct {
	Line  string // as it stands on the console
	Fatal bool   // the kernel cannot be trusted any more: a run during which this appears has failed
}

// complaintPatterns recognise complaints in the order given. A soft lock-up or a stall of RCU is not fatal: under emulation the host may
// simply not have run a virtual CPU for long.
var complaintPatterns = []struct {
	re    *regexp.Regexp
	fatal bool
}{
	{regexp.MustCompile(`soft lockup|rcu: INFO:|rcu_\w+ (self-)?detected .*stall`), false},
	{regexp.MustCompile(`Kernel panic`), true},
	{regexp.MustCompile(`BUG: |kernel BUG at|Oops: |general protection fault|Unable to handle kernel`), true},
	{regexp.MustCompile(`INFO: task .* blocked for more than`), true},
	{regexp.MustCompile(`possible (recursive locking|circular locking)|refcount_t: `), true},
	{regexp.MustCompile(`WARNING: `), false},
	{regexp.MustCompile(`Out of memory: Killed process`), true},
}

// consoleLines is how many lines of the console are kept in memory, reportLines how many a report shows.
const (
	consoleLines = 4000
	reportLines  = 60
)

// console collects what the guest's kernel and first process print.
type console struct {
	copy  io.Writer       // gets everything as it comes; may be nil
	fatal func(Complaint) // called once per fatal complaint, with mu not held

	mu         sync.Mutex
	lines      []string
	complaints []Complaint
}

// runConsole reads until the end of r.
func (c *console) runConsole(r io.Reader) {
	br := bufio.NewReaderSize(r, 16<<10)
	for {
		line, err := br.ReadString('\n')
		if line != "" {
			c.add(line)
		}
		if err != nil {
			return
		}
	}
}

// escapes matches terminal control sequences, which firmware prints.
var escapes = regexp.MustCompile(`\x1b(\[[0-9;?=]*[A-Za-z]|[()][A-Z0-9]|c)`)

func (c *console) add(line string) {
	line = strings.TrimRight(escapes.ReplaceAllString(line, ""), "\r\n")
	if strings.TrimSpace(line) == "" {
		return
	}
	if c.copy != nil {
		io.WriteString(c.copy, line+"\n")
	}
	complaint, found := complain(line)
	c.mu.Lock()
	if len(c.lines) == consoleLines {
		c.lines = append(c.lines[:0], c.lines[consoleLines/2:]...)
	}
	c.lines = append(c.lines, line)
	if found {
		c.complaints = append(c.complaints, complaint)
	}
	c.mu.Unlock()
	if found && complaint.Fatal && c.fatal != nil {
		c.fatal(complaint)
	}
}

// complain tells whether a line is a complaint. Lines of the user space, which have no time stamp in front, are not.
func complain(line string) (Complaint, bool) {
	if !strings.HasPrefix(line, "[") {
		return Complaint{}, false
	}
	for _, p := range complaintPatterns {
		if p.re.MatchString(line) {
			return Complaint{Line: line, Fatal: p.fatal}, true
		}
	}
	return Complaint{}, false
}

// tail returns the last n lines.
func (c *console) tail(n int) []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]string(nil), c.lines[max(0, len(c.lines)-n):]...)
}

// contains reports whether a line that is still kept holds s.
func (c *console) contains(s string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, l := range c.lines {
		if strings.Contains(l, s) {
			return true
		}
	}
	return false
}

// all returns the complaints so far.
func (c *console) all() []Complaint {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]Complaint(nil), c.complaints...)
}
