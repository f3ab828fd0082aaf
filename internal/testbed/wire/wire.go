// Package wire is the conversation between the test harness on the host and its agent in the guest.
//
// Both ends share one byte stream, a virtio-serial port. It carries frames: a type, the number of the command the frame belongs to, and a
// payload. The host speaks first with [Setup]; the agent prepares the guest and answers [Ready]; then the host starts commands and the
// agent returns their output and [Exit].
//
//	off len
//	  0   1  type
//	  1   4  command number, big endian; 0 where no command is meant
//	  5   4  length of the payload, bytes, big endian, at most MaxPayload
//	  9   n  payload: JSON for Setup, Ready, Start and Exit; raw bytes for Input, Stdout and Stderr; nothing for the others
package wire

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"sync"
)

// PortName is the name of the virtio-serial port, as the guest finds it under /sys/class/virtio-ports.
const PortName = "iserd.testbed"

// MaxPayload bounds a frame, in bytes.
const MaxPayload = 1 << 20

const headerLen = 9

// Type tells what a frame carries.
type Type byte

// The frame types.
const (
	TypeSetup    Type = 1  // host to guest: Setup
	TypeReady    Type = 2  // guest to host: Ready
	TypeStart    Type = 3  // host to guest: Start
	TypeInput    Type = 4  // host to guest: bytes for standard input; an empty payload closes it
	TypeKill     Type = 5  // host to guest: end the command and everything it started
	TypeStdout   Type = 6  // guest to host
	TypeStderr   Type = 7  // guest to host
	TypeExit     Type = 8  // guest to host: Exit; the last frame of a command
	TypePing     Type = 9  // host to guest
	TypePong     Type = 10 // guest to host
	TypePowerOff Type = 11 // host to guest: shut down
)

// Setup tells the agent what to prepare before the first command.
type Setup struct {
	SystemBus bool     `json:"system_bus"` // start the D-Bus system bus
	Modules   []string `json:"modules"`    // kernel modules beyond those that are always loaded
}

// Ready answers Setup.
type Ready struct {
	Kernel   string   `json:"kernel"`   // release, as uname -r prints it
	Problems []string `json:"problems"` // what could not be prepared, one sentence each; empty when all is well
}

// Start asks for a command.
type Start struct {
	Args  []string `json:"args"`  // Args[0] is looked up in PATH
	Env   []string `json:"env"`   // NAME=value, added to the agent's own
	Dir   string   `json:"dir"`   // working directory; /tmp when empty
	Merge bool     `json:"merge"` // standard error goes where standard output goes, in order
}

// Exit ends a command.
type Exit struct {
	Code     int      `json:"code"`               // exit status; 128 plus the signal's number when a signal ended it
	Error    string   `json:"error,omitempty"`    // why it could not be started
	Leftover []string `json:"leftover,omitempty"` // processes it left running, which the agent has killed
}

// Frame is one message.
type Frame struct {
	Type    Type
	ID      uint32
	Payload []byte
}

// Decode reads the JSON payload into v.
func (f Frame) Decode(v any) error {
	if err := json.Unmarshal(f.Payload, v); err != nil {
		return fmt.Errorf("frame of type %d: %w", f.Type, err)
	}
	return nil
}

// Conn sends and receives frames on a stream. Send may be called from several goroutines, Receive from one.
type Conn struct {
	mu sync.Mutex // serialises writes
	w  io.Writer
	r  *bufio.Reader
}

// NewConn puts frames on rw.
func NewConn(rw io.ReadWriter) *Conn { return &Conn{w: rw, r: bufio.NewReaderSize(rw, 64<<10)} }

// Send writes one frame with a raw payload, which may be nil.
func (c *Conn) Send(t Type, id uint32, payload []byte) error {
	if len(payload) > MaxPayload {
		return fmt.Errorf("frame of type %d: payload of %d bytes is over %d", t, len(payload), MaxPayload)
	}
	b := make([]byte, headerLen+len(payload))
	b[0] = byte(t)
	binary.BigEndian.PutUint32(b[1:], id)
	binary.BigEndian.PutUint32(b[5:], uint32(len(payload)))
	copy(b[headerLen:], payload)
	c.mu.Lock()
	defer c.mu.Unlock()
	_, err := c.w.Write(b)
	return err
}

// SendJSON writes one frame with v as its payload.
func (c *Conn) SendJSON(t Type, id uint32, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return c.Send(t, id, b)
}

// Receive reads the next frame. The payload belongs to the caller. It returns io.EOF at the end of the stream and
// io.ErrUnexpectedEOF inside a frame.
func (c *Conn) Receive() (Frame, error) {
	var h [headerLen]byte
	if _, err := io.ReadFull(c.r, h[:]); err != nil {
		return Frame{}, err
	}
	f := Frame{Type: Type(h[0]), ID: binary.BigEndian.Uint32(h[1:])}
	n := binary.BigEndian.Uint32(h[5:])
	if n > MaxPayload {
		return Frame{}, fmt.Errorf("frame of type %d: payload of %d bytes is over %d", f.Type, n, MaxPayload)
	}
	f.Payload = make([]byte, n)
	if _, err := io.ReadFull(c.r, f.Payload); err != nil {
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return Frame{}, err
	}
	return f, nil
}
