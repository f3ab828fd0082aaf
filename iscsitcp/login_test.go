package iscsitcp

import (
	"testing"

	"iserd.org/iserd/iscsi/login"
)

// loginConfig is what the tests propose.
func loginConfig(target string) login.Config {
	keys := login.DefaultKeys(login.TCP, login.Normal)
	keys.MaxRecvDataSegmentLength = MaxRecvDataSegmentLength
	return login.Config{
		InitiatorName: "iqn.2003-01.org.example:me", TargetName: target, SessionType: login.Normal, Transport: login.TCP,
		ISID: [6]byte{0x80}, CmdSN: 0xfffffff0, // CmdSN wraps in every test
		Keys: &keys,
	}
}

// logIn runs the login machine over a port.
func logIn(t testing.TB, p *Port, config login.Config) *login.Result {
	t.Helper()
	m, err := login.New(config)
	if err != nil {
		t.Fatal(err)
	}
	for req := m.Start(); ; {
		resp, data, err := p.Exchange(t.Context(), &req.BHS, req.Text, req.Final)
		if err != nil {
			t.Fatal(err)
		}
		next, result, err := m.Step(resp, data)
		if err != nil {
			t.Fatal(err)
		}
		if result != nil {
			return result
		}
		req = next
	}
}
