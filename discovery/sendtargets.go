package discovery

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"syscall"
	"time"

	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/internal/settings"
	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/iscsi/login"
	"iserd.org/iserd/iscsi/pdu"
	"iserd.org/iserd/iscsitcp"
	"iserd.org/iserd/iser"
	"iserd.org/iserd/rdma"
)

// Request asks one portal.
type Request struct {
	Portal        string        // ADDR:PORT or NAME:PORT
	Transport     ipc.Transport // iser or tcp
	InitiatorName string
	Timeout       time.Duration // of the whole discovery; 0 means 15 s
	Auth          login.Auth
	Way           settings.Binding // out of this host
}

// Record is one portal of one target.
type Record struct {
	Target    string // a valid iSCSI name, lower case
	Address   string // IP address or host name, without brackets
	Port      uint16
	TPGT      uint16 // target portal group tag
	Transport ipc.Transport
}

// SendTargets asks a portal for everything that its target node offers to this initiator. The order is the target's.
//
// Errors: [rdma.ErrNoDevice], [rdma.ErrRefused], syscall.ECONNREFUSED, context.DeadlineExceeded, *[login.LoginError] and
// *[iscsi.ProtocolError], all wrapped.
func SendTargets(ctx context.Context, r Request) ([]Record, error) {
	if r.Timeout <= 0 {
		r.Timeout = 15 * time.Second
	}
	ctx, cancel := context.WithTimeout(ctx, r.Timeout)
	defer cancel()
	for try := 1; ; try++ {
		records, err := ask(ctx, r)
		if err == nil || try == maxTries || !dropped(err) {
			return records, err
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return nil, err
		}
	}
}

// A connection that the target drops is worth another try: isert does so when it finds no memory for the connection, a busy tgtd when it is
// still at the end of the one before.
const (
	maxTries = 3
	pause    = 250 * time.Millisecond
)

// dropped reports whether an established connection was lost, as against refused, silent, or ended by a protocol error.
func dropped(err error) bool {
	var completion *rdma.WCError
	return errors.As(err, &completion) || errors.Is(err, iser.ErrDisconnected) || errors.Is(err, login.ErrConnectionLost) ||
		errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET)
}

// ask is one attempt.
func ask(ctx context.Context, r Request) ([]Record, error) {
	port, err := open(ctx, r)
	if err != nil {
		return nil, err
	}
	defer port.Close()

	config := login.Config{
		InitiatorName: r.InitiatorName,
		SessionType:   login.Discovery,
		Transport:     login.TCP,
		Auth:          r.Auth,
	}
	if r.Transport == ipc.TransportISER {
		keys := login.DefaultKeys(login.ISER, login.Discovery)
		keys.MaxRecvDataSegmentLength = iser.LoginDataSegmentLength // the answer comes in one Send
		config.Transport, config.Keys = login.ISER, &keys
	}
	// A discovery session is no nexus that anything could be fenced with, and must not reinstate one: its ISID is random each time.
	config.ISID[0] = 0x80
	rand.Read(config.ISID[1:])
	result, err := iscsi.Login(ctx, port, config)
	if err != nil {
		return nil, err
	}
	x := iscsi.NewExchange(port, result)
	text, err := x.Text(ctx, "SendTargets", "All")
	if err != nil {
		return nil, err
	}
	targets, err := pdu.ParseSendTargets(text)
	if err != nil {
		return nil, fmt.Errorf("answer to SendTargets: %w", err)
	}
	// The answer is complete. A target that does not care for a polite end does not make the discovery fail.
	_ = x.Logout(ctx)

	asked, err := pdu.ParseAddress(r.Portal)
	if err != nil {
		return nil, err
	}
	var records []Record
	for _, t := range targets {
		if t.Name == "" {
			continue // not an iSCSI name: nothing that could be logged in to
		}
		if len(t.Addresses) == 0 {
			// Without an address the target is at the one that was asked (RFC 7143 appendix C).
			t.Addresses = []pdu.Address{asked}
		}
		for _, a := range t.Addresses {
			records = append(records, Record{Target: t.Name, Address: a.Host, Port: a.Port, TPGT: a.TPGT, Transport: r.Transport})
		}
	}
	return records, nil
}

// open connects to the portal.
func open(ctx context.Context, r Request) (iscsi.Port, error) {
	if r.Transport != ipc.TransportISER {
		return iscsitcp.DialBy(ctx, r.Way.Dialer(), r.Portal)
	}
	var loop *iser.Loop
	port, err := iser.DialBy(ctx, iser.Way{Source: r.Way.Source}, r.Portal, func(dev *rdma.Device) (c iser.Config, err error) {
		if err := r.Way.Check(dev.Name()); err != nil {
			return c, err
		}
		if loop, err = iser.NewLoop(dev); err != nil {
			return c, err
		}
		return loop.Config, nil
	})
	if err != nil {
		if loop != nil {
			loop.Close()
		}
		return nil, err
	}
	return &looped{port, loop}, nil
}

// looped is a port that ends with its loop.
type looped struct {
	*iser.Port
	loop *iser.Loop
}

func (l *looped) Close() error {
	l.Port.Close()
	if l.loop != nil {
		l.loop.Close()
		l.loop = nil
	}
	return nil
}
