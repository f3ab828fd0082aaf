package discovery

import (
	"context"
	"errors"
	"testing"
	"time"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/internal/settings"
	"iserd.org/iserd/internal/testtarget"
	"iserd.org/iserd/iscsi/login"
)

// A discovery session proves itself as any other, and wants proof where it is asked to.
func TestCHAP(t *testing.T) {
	target, err := testtarget.Start(testtarget.Config{CHAP: &testtarget.CHAP{User: "finder", Secret: "our secret", TargetUser: "storage", TargetSecret: "their secret"}})
	if err != nil {
		t.Fatal(err)
	}
	defer target.Close()
	for _, c := range []struct {
		name         string
		how          api.Settings
		ours, theirs string
		ok           bool
	}{
		{"one way", api.Settings{CHAPUser: "finder"}, "our secret", "", true},
		{"mutual", api.Settings{CHAPUser: "finder", CHAPTargetUser: "storage"}, "our secret", "their secret", true},
		{"one algorithm", api.Settings{CHAPUser: "finder", CHAPAlgorithms: []string{"SHA256"}}, "our secret", "", true},
		{"nothing", api.Settings{}, "", "", false},
		{"another secret", api.Settings{CHAPUser: "finder"}, "no secret", "", false},
		{"the target has another", api.Settings{CHAPUser: "finder"}, "our secret", "no secret", false},
	} {
		list, err := SendTargets(context.Background(), Request{
			Portal: target.Addr(), Transport: ipc.TransportTCP, InitiatorName: "iqn.2026-11.org.iserd:test", Timeout: 5 * time.Second,
			Auth: settings.Auth(&c.how, api.NewSecret([]byte(c.ours)), api.NewSecret([]byte(c.theirs)), "iqn.2026-11.org.iserd:test"),
		})
		if c.ok != (err == nil && len(list) == 1) || !c.ok && !errors.Is(err, login.ErrAuthFailed) {
			t.Errorf("%s: %v, %v", c.name, list, err)
		}
	}
}

func TestSourceAddress(t *testing.T) {
	target, err := testtarget.Start(testtarget.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer target.Close()
	way := settings.BindingOf(&api.Settings{SourceAddress: "127.0.0.5", NetworkInterface: "lo"})
	list, err := SendTargets(context.Background(), Request{
		Portal: target.Addr(), Transport: ipc.TransportTCP, InitiatorName: "iqn.2026-11.org.iserd:test", Timeout: 5 * time.Second, Way: way,
	})
	if err != nil || len(list) != 1 {
		t.Errorf("%v, %v", list, err)
	}
	way = settings.BindingOf(&api.Settings{SourceAddress: "192.0.2.1"}) // not of this host
	if list, err = SendTargets(context.Background(), Request{
		Portal: target.Addr(), Transport: ipc.TransportTCP, InitiatorName: "iqn.2026-11.org.iserd:test", Timeout: 5 * time.Second, Way: way,
	}); err == nil {
		t.Errorf("%v from an address of somebody else", list)
	}
}
