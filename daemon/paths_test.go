package daemon_test

import (
	"context"
	"slices"
	"testing"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/ipc"
)

// The other portals of a target are handed to the data plane with a login, and to the next one when it has ended; those with other settings are not.
func TestOtherPortals(t *testing.T) {
	for _, also := range []bool{false, true} {
		l := newLab(t)
		d := l.start()
		ctx := context.Background()
		l.addNode(d)
		for _, p := range []string{"10.0.0.2:3260", "10.0.0.3:3260", "10.0.0.4:3260"} {
			if _, err := d.AddNode(iqn, p); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := d.SetNode(ctx, api.SettingsRequest{Target: iqn, Portal: "10.0.0.3:3260", Set: map[string]string{"header_digest": "CRC32C"}}); err != nil {
			t.Fatal(err)
		}
		if _, err := d.SetNodeSecret(ctx, api.SecretRequest{Target: iqn, Portal: "10.0.0.4:3260", Name: "chap_secret", Secret: api.NewSecret([]byte("a secret of theirs"))}); err != nil {
			t.Fatal(err)
		}
		self := ipc.Route{Portal: portal, Transport: ipc.TransportAuto} // the data plane after this one is not told that it was left open
		want := []ipc.Route{self, {Portal: "10.0.0.2:3260", Transport: ipc.TransportAuto}}
		if _, err := d.Login(ctx, api.LoginRequest{Target: iqn}); err != nil {
			t.Fatal(err)
		}
		if r := l.Plane.Asked()[0]; r.Portal != portal || r.Policy != api.PathFailover || !slices.Equal(r.Others, want) {
			t.Errorf("login at %s, others %v, policy %q", r.Portal, r.Others, r.Policy)
		}
		l.Plane.Kill()
		if also { // the daemon as well: what it knew is in RUN/devices
			d.Kill()
			l.Blocks.ServerDied()
			d = l.start()
		} else {
			l.Blocks.ServerDied()
		}
		l.live(d, 2, 2)
		asked := l.Plane.Restored()
		if len(asked) != 1 || !slices.Equal(asked[0].Others, want) {
			t.Errorf("restored %+v", asked)
		}
		if _, err := d.Logout(ctx, api.LogoutRequest{Session: iqn}); err != nil {
			t.Fatal(err)
		}
		// Who names a portal gets that one.
		if _, err := d.Login(ctx, api.LoginRequest{Target: iqn, Portal: portal}); err != nil {
			t.Fatal(err)
		}
		if r := l.Plane.Asked()[1]; !slices.Equal(r.Others, []ipc.Route{self}) {
			t.Errorf("others %v", r.Others)
		}
		if _, err := d.Logout(ctx, api.LogoutRequest{Session: iqn}); err != nil {
			t.Fatal(err)
		}
		l.clean()
	}
}
