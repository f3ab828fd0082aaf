package daemon_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"iserd.org/iserd/api"
	"iserd.org/iserd/client"
	"iserd.org/iserd/daemon"
	"iserd.org/iserd/daemon/daemontest"
	"iserd.org/iserd/internal/ipc"
)

// addNode stores a record of the lab's target.
func (l *lab) addNode(d *daemontest.Daemon) api.Node {
	l.t.Helper()
	n, err := d.AddNode(iqn, portal)
	if err != nil {
		l.t.Fatal(err)
	}
	return n
}

func TestSetNode(t *testing.T) {
	l := newLab(t)
	d := l.start()
	ctx := context.Background()
	n := l.addNode(d)
	if n.Settings.Transport != "auto" || len(n.Secrets) != 0 || n.Secrets == nil {
		t.Errorf("new record %+v", n)
	}
	for _, r := range []api.SettingsRequest{
		{Target: iqn}, {Target: iqn, Set: map[string]string{"x": "y"}}, {Target: iqn, Unset: []string{"x"}},
		{Target: iqn, Set: map[string]string{"max_burst_length": "4096", "first_burst_length": "8192"}},
		{Target: iqn, Set: map[string]string{"transport": "iser", "data_digest": "CRC32C"}}, {Target: "", Set: map[string]string{"auth": "none"}},
		{Target: iqn, Set: map[string]string{"chap_secret": "leaks"}},
	} {
		if _, err := d.SetNode(ctx, r); !api.Is(err, api.ErrInvalidArgs) || strings.Contains(err.Error(), "leaks") {
			t.Errorf("%+v: %v", r, err)
		}
	}
	if _, err := d.SetNode(ctx, api.SettingsRequest{Target: "iqn.2003-01.org.example:none", Set: map[string]string{"auth": "none"}}); !api.Is(err, api.ErrNotFound) {
		t.Error(err)
	}
	r, err := d.SetNode(ctx, api.SettingsRequest{Target: iqn, Set: map[string]string{"chap_user": "host", "replacement_timeout": "forever", "transport": "tcp", "login_timeout": "77"}})
	if err != nil || len(r.Nodes) != 1 || r.Nodes[0].Settings.CHAPUser != "host" || *r.Nodes[0].Settings.ReplacementTimeout != api.Forever || r.Nodes[0].Transport != "tcp" {
		t.Fatalf("%+v, %v", r, err)
	}
	if _, err := d.SetNodeSecret(ctx, api.SecretRequest{Target: iqn, Name: api.CHAPSecret, Secret: api.NewSecret([]byte("our secret"))}); err != nil {
		t.Fatal(err)
	}
	login := func() api.LoginReply {
		t.Helper()
		r, err := d.Login(ctx, api.LoginRequest{Target: iqn})
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	login()
	asked := l.Plane.Asked()[0]
	if asked.Settings.CHAPUser != "host" || string(asked.Secret.Reveal()) != "our secret" || !asked.TargetSecret.IsZero() || asked.Transport != ipc.TransportTCP ||
		asked.Timeout != 77*time.Second || asked.RequestTimeout != 30*time.Second || *asked.Settings.ReplacementTimeout != api.Forever {
		t.Errorf("the data plane was asked %+v", asked)
	}
	// What is set while a session is up waits for the next one, and a new daemon knows it, too.
	if r, err = d.SetNode(ctx, api.SettingsRequest{Target: iqn, Set: map[string]string{"auth": "none", "request_timeout": "0"}, Unset: []string{"login_timeout"}}); err != nil {
		t.Fatal(err)
	}
	want := []string{"auth", "login_timeout", "request_timeout"}
	if !slices.Equal(r.Nodes[0].Pending, want) {
		t.Errorf("pending %q", r.Nodes[0].Pending)
	}
	d.Kill()
	d = l.start()
	if r, err := d.Nodes(api.NodeFilter{}); err != nil || !slices.Equal(r.Nodes[0].Pending, want) || !slices.Equal(r.Nodes[0].Secrets, []string{api.CHAPSecret}) {
		t.Errorf("after a restart %+v, %v", r, err)
	}
	if _, err := d.Logout(ctx, api.LogoutRequest{Session: iqn}); err != nil {
		t.Fatal(err)
	}
	login()
	if asked = l.Plane.Asked()[1]; !asked.Secret.IsZero() || asked.Settings.LoginTimeout != nil || asked.Timeout != l.Config.LoginTimeout ||
		asked.RequestTimeout != 0 {
		t.Errorf("the data plane was asked %+v", asked)
	}
	if _, err := d.Logout(ctx, api.LogoutRequest{Session: iqn}); err != nil {
		t.Fatal(err)
	}
	// A record that is made again after its end has no secrets.
	if _, err := d.DeleteNodes(api.NodeFilter{Target: iqn}); err != nil {
		t.Fatal(err)
	}
	if n := l.addNode(d); len(n.Secrets) != 0 || n.Settings.CHAPUser != "" {
		t.Errorf("a new record has %+v", n)
	}
}

// What is asked for without the secrets for it is said before a target is bothered.
func TestMissingSecrets(t *testing.T) {
	l := newLab(t)
	d := l.start()
	ctx := context.Background()
	l.addNode(d)
	fails := func(says string) {
		t.Helper()
		if _, err := d.Login(ctx, api.LoginRequest{Target: iqn}); !api.Is(err, api.ErrInvalidArgs) || !strings.Contains(err.Error(), says) {
			t.Errorf("%v does not say %q", err, says)
		}
	}
	if _, err := d.SetNode(ctx, api.SettingsRequest{Target: iqn, Set: map[string]string{"auth": "chap"}}); err != nil {
		t.Fatal(err)
	}
	fails("iserctl node secret")
	if _, err := d.SetNodeSecret(ctx, api.SecretRequest{Target: iqn, Name: api.CHAPTargetSecret, Secret: api.NewSecret([]byte("theirs"))}); err != nil {
		t.Fatal(err)
	}
	if _, err := d.SetNode(ctx, api.SettingsRequest{Target: iqn, Unset: []string{"auth"}}); err != nil {
		t.Fatal(err)
	}
	fails("no chap_secret")
	if _, err := d.SetNodeSecret(ctx, api.SecretRequest{Target: iqn, Name: api.CHAPSecret, Secret: api.NewSecret([]byte("theirs"))}); !api.Is(err, api.ErrInvalidArgs) {
		t.Errorf("the same in both directions: %v", err)
	}
	if _, err := d.SetNodeSecret(ctx, api.SecretRequest{Target: iqn, Name: "password", Secret: api.NewSecret([]byte("x"))}); !api.Is(err, api.ErrInvalidArgs) {
		t.Error(err)
	}
	if l.Plane.Logins() != 0 {
		t.Error("the data plane was asked")
	}
	if _, err := d.SetNodeSecret(ctx, api.SecretRequest{Target: iqn, Name: api.CHAPSecret, Secret: api.NewSecret([]byte("short"))}); err != nil {
		t.Fatal(err)
	}
	if _, err := d.SetNode(ctx, api.SettingsRequest{Target: iqn, Set: map[string]string{"chap_policy": "strong"}}); err != nil {
		t.Fatal(err)
	}
	fails("12 or more")
	// A file that others can read is refused, and the login says so.
	files, _ := filepath.Glob(filepath.Join(l.Dir, "state", "secrets", "*.json"))
	if len(files) != 1 {
		t.Fatal(files)
	}
	if err := os.Chmod(files[0], 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Login(ctx, api.LoginRequest{Target: iqn}); !api.Is(err, api.ErrDatabase) || !strings.Contains(err.Error(), "others can read") {
		t.Error(err)
	}
}

// A data plane from before an upgrade would leave out what is set without a word.
func TestOldDataPlane(t *testing.T) {
	l := newLab(t)
	l.Plane.Old = true
	d := l.start()
	ctx := context.Background()
	l.addNode(d)
	if _, err := d.Login(ctx, api.LoginRequest{Target: iqn}); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Logout(ctx, api.LogoutRequest{Session: iqn}); err != nil {
		t.Fatal(err)
	}
	if _, err := d.SetNode(ctx, api.SettingsRequest{Target: iqn, Set: map[string]string{"data_digest": "CRC32C"}}); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Login(ctx, api.LoginRequest{Target: iqn}); !api.Is(err, api.ErrNotSupported) || !strings.Contains(err.Error(), "data_digest") {
		t.Error(err)
	}
}

func TestPortalSettings(t *testing.T) {
	l := newLab(t)
	l.Portals[portal] = &daemontest.Portal{Lists: map[string][]daemon.Found{"tcp": {{Target: iqn, Address: "10.0.0.1", Port: 3260, TPGT: 1}}}}
	d := l.start()
	ctx := context.Background()
	for _, r := range []api.SettingsRequest{
		{Portal: portal, Set: map[string]string{"data_digest": "CRC32C"}}, {Portal: portal}, {Portal: "x y", Set: map[string]string{"auth": "none"}},
		{Portal: portal, Target: iqn, Set: map[string]string{"auth": "none"}},
	} {
		if _, err := d.SetPortal(ctx, r); !api.Is(err, api.ErrInvalidArgs) {
			t.Errorf("%+v: %v", r, err)
		}
	}
	if r := d.Portals(); len(r.Portals) != 0 {
		t.Errorf("a refused request has made %+v", r)
	}
	if _, err := d.SetPortal(ctx, api.SettingsRequest{Portal: portal, Set: map[string]string{"source_address": "10.0.0.2", "chap_user": "host", "auth": "chap"}}); err != nil {
		t.Fatal(err)
	}
	ask := api.DiscoverRequest{Portal: portal, Transport: "tcp", Save: true}
	if _, err := d.Discover(ctx, ask); !api.Is(err, api.ErrInvalidArgs) || !strings.Contains(err.Error(), "discovery secret") {
		t.Errorf("without a secret: %v", err)
	}
	if _, err := d.SetPortalSecret(ctx, api.SecretRequest{Portal: portal, Name: api.CHAPSecret, Secret: api.NewSecret([]byte("for discovery"))}); err != nil {
		t.Fatal(err)
	}
	d.Kill()
	d = l.start()
	ask.Set = map[string]string{"chap_user": "guest", "login_timeout": "3"}
	if _, err := d.Discover(ctx, ask); err != nil {
		t.Fatal(err)
	}
	q := l.Questions()[0]
	if q.Settings.SourceAddress != "10.0.0.2" || q.Settings.CHAPUser != "guest" || string(q.Secrets.Secret.Reveal()) != "for discovery" || q.Timeout != 3*time.Second {
		t.Errorf("asked %+v", q)
	}
	// The record is bound as the discovery was, and has nothing else of it.
	r, err := d.Nodes(api.NodeFilter{})
	if err != nil || len(r.Nodes) != 1 || !reflect.DeepEqual(r.Nodes[0].Settings, api.Settings{Transport: "auto", SourceAddress: "10.0.0.2"}) || len(r.Nodes[0].Secrets) != 0 {
		t.Errorf("%+v, %v", r, err)
	}
	// Another discovery leaves what the user has set.
	if _, err := d.SetNode(ctx, api.SettingsRequest{Target: iqn, Set: map[string]string{"source_address": "10.0.0.3", "data_digest": "CRC32C", "login_timeout": "9"}}); err != nil {
		t.Fatal(err)
	}
	if _, err := d.SetNodeSecret(ctx, api.SecretRequest{Target: iqn, Name: api.CHAPSecret, Secret: api.NewSecret([]byte("for logins"))}); err != nil {
		t.Fatal(err)
	}
	before, _ := d.Nodes(api.NodeFilter{})
	if _, err := d.Discover(ctx, ask); err != nil {
		t.Fatal(err)
	}
	after, _ := d.Nodes(api.NodeFilter{})
	if !reflect.DeepEqual(before.Nodes[0].Settings, after.Nodes[0].Settings) || !reflect.DeepEqual(before.Nodes[0].Secrets, after.Nodes[0].Secrets) {
		t.Errorf("before %+v\nafter %+v", before.Nodes, after.Nodes)
	}
	if p := d.Portals(); len(p.Portals) != 1 || p.Portals[0].Settings.CHAPUser != "host" || p.Portals[0].Settings.LoginTimeout != nil || len(p.Portals[0].Secrets) != 1 {
		t.Errorf("%+v", p)
	}
	if _, err := d.DeletePortal(ctx, api.NodeFilter{Portal: portal}); err != nil {
		t.Fatal(err)
	}
	if _, err := d.DeletePortal(ctx, api.NodeFilter{Portal: portal}); !api.Is(err, api.ErrNotFound) {
		t.Error(err)
	}
	ask.Set = nil
	if _, err := d.Discover(ctx, ask); err != nil {
		t.Fatal(err)
	}
	if qs := l.Questions(); !reflect.DeepEqual(qs[len(qs)-1].Settings, api.Settings{}) || !qs[len(qs)-1].Secrets.Secret.IsZero() {
		t.Errorf("asked %+v after it was to be forgotten", qs[len(qs)-1])
	}
}

// Where a target has moved to for good is stored, gone to first, and left again when nobody is there.
func TestMovedTarget(t *testing.T) {
	const away = "10.0.0.9:3260"
	l := newLab(t)
	target := func(movedTo, gone string) {
		l.Plane.AddTarget(iqn, &daemontest.Target{TPGT: 1, Units: []ipc.Unit{daemontest.Disk(0, 64<<20)}, MovedTo: movedTo, Gone: gone})
	}
	target(away, "")
	d := l.start()
	ctx := context.Background()
	l.addNode(d)
	node := func() api.Node {
		t.Helper()
		r, err := d.Nodes(api.NodeFilter{Target: iqn})
		if err != nil || len(r.Nodes) != 1 {
			t.Fatal(r, err)
		}
		return r.Nodes[0]
	}
	again := func() string {
		t.Helper()
		if _, err := d.Login(ctx, api.LoginRequest{Target: iqn}); err != nil {
			t.Fatal(err)
		}
		asked := l.Plane.Asked()
		if _, err := d.Logout(ctx, api.LogoutRequest{Session: iqn}); err != nil {
			t.Fatal(err)
		}
		return asked[len(asked)-1].Portal
	}
	id := node().ID
	if at := again(); at != portal || node().MovedTo != away || node().ID != id {
		t.Errorf("asked at %s, then %+v", at, node())
	}
	if at := again(); at != away || node().MovedTo != away {
		t.Errorf("asked at %s, then %+v", at, node())
	}
	target("", away)
	if at := again(); at != portal || node().MovedTo != "" {
		t.Errorf("asked at %s, then %+v", at, node())
	}
	// The word of a target during a session counts as well.
	if _, err := d.Login(ctx, api.LoginRequest{Target: iqn}); err != nil {
		t.Fatal(err)
	}
	changes, stop := d.Watch()
	defer stop()
	l.Plane.Move(iqn, "10.0.0.8:3260")
	for limit := time.After(10 * time.Second); node().MovedTo != "10.0.0.8:3260"; {
		select {
		case <-changes:
		case <-limit:
			t.Fatalf("%+v", node())
		}
	}
	// What was said while no control plane ran is found by the next one.
	d.Kill()
	l.Plane.Move(iqn, "10.0.0.7:3260")
	d = l.start()
	if node().MovedTo != "10.0.0.7:3260" {
		t.Errorf("%+v", node())
	}
	if _, err := d.SetNode(ctx, api.SettingsRequest{Target: iqn, Unset: []string{api.MovedTo}}); err != nil || node().MovedTo != "" {
		t.Errorf("%+v, %v", node(), err)
	}
}

func TestFirmware(t *testing.T) {
	l := newLab(t)
	d := l.start()
	ctx := context.Background()
	if _, err := d.Firmware(ctx, api.FirmwareRequest{}); !api.Is(err, api.ErrNotFound) || !strings.Contains(err.Error(), "iscsi_ibft") {
		t.Error(err)
	}
	if err := os.CopyFS(filepath.Join(l.Dir, "ibft"), os.DirFS("../discovery/ibft/testdata")); err != nil {
		t.Fatal(err)
	}
	r, err := d.Firmware(ctx, api.FirmwareRequest{})
	if err != nil || len(r.Targets) != 2 || len(r.NICs) != 2 || r.Targets[0].Saved || r.Targets[0].Auth != "mutual chap" || len(r.Notes) != 2 {
		t.Fatalf("%+v, %v", r, err)
	}
	if n, _ := d.Nodes(api.NodeFilter{}); len(n.Nodes) != 0 {
		t.Errorf("records without being asked: %+v", n)
	}
	if r, err = d.Firmware(ctx, api.FirmwareRequest{Save: true}); err != nil || !r.Targets[1].Saved {
		t.Fatalf("%+v, %v", r, err)
	}
	boot := r.Targets[0].Target
	n, err := d.Nodes(api.NodeFilter{Target: boot})
	if err != nil || len(n.Nodes) != 1 || n.Nodes[0].Settings.CHAPUser != "client1" || n.Nodes[0].Settings.CHAPTargetUser != "storage" || len(n.Nodes[0].Secrets) != 2 {
		t.Fatalf("%+v, %v", n, err)
	}
	// Reading it again leaves what the user has set.
	if _, err := d.SetNode(ctx, api.SettingsRequest{Target: boot, Set: map[string]string{"chap_user": "me"}}); err != nil {
		t.Fatal(err)
	}
	if _, err := d.SetNodeSecret(ctx, api.SecretRequest{Target: boot, Name: api.CHAPTargetSecret}); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Firmware(ctx, api.FirmwareRequest{Save: true}); err != nil {
		t.Fatal(err)
	}
	if n, _ = d.Nodes(api.NodeFilter{Target: boot}); n.Nodes[0].Settings.CHAPUser != "me" || !slices.Equal(n.Nodes[0].Secrets, []string{api.CHAPSecret}) {
		t.Errorf("%+v", n)
	}
}

// No secret is in what the daemon writes (but for its own file), logs or answers, also when things go wrong.
func TestSecretsDoNotShow(t *testing.T) {
	l := newLab(t)
	d := l.start()
	ctx := context.Background()
	c := client.New(l.Socket())
	defer c.Close()
	secrets := []string{"hush: our own secret", "hush: that of the target", "hush: for discoveries"}
	var answers []any
	note := func(v any, err error) {
		if err != nil {
			answers = append(answers, err.Error())
		}
		answers = append(answers, v)
	}
	l.addNode(d)
	note(c.SetNodeSecret(ctx, api.SecretRequest{Target: iqn, Name: api.CHAPSecret, Secret: api.NewSecret([]byte(secrets[0]))}))
	note(c.SetNodeSecret(ctx, api.SecretRequest{Target: iqn, Name: api.CHAPTargetSecret, Secret: api.NewSecret([]byte(secrets[1]))}))
	note(c.SetNodeSecret(ctx, api.SecretRequest{Target: iqn, Name: api.CHAPTargetSecret, Secret: api.NewSecret([]byte(secrets[0]))})) // refused
	note(c.SetNodeSecret(ctx, api.SecretRequest{Target: iqn, Name: "password", Secret: api.NewSecret([]byte(secrets[0]))}))           // refused
	note(c.SetPortalSecret(ctx, api.SecretRequest{Portal: portal, Name: api.CHAPSecret, Secret: api.NewSecret([]byte(secrets[2]))}))
	note(c.Discover(ctx, api.DiscoverRequest{Portal: portal, Transport: "tcp", Timeout: 0.2}))
	l.Plane.AddTarget("iqn.2003-01.org.example:bad", &daemontest.Target{Err: &ipc.Error{Code: "AuthenticationFailed", Text: "status 02/01"}})
	note(c.AddNode(ctx, "iqn.2003-01.org.example:bad", portal))
	note(c.SetNodeSecret(ctx, api.SecretRequest{Target: "iqn.2003-01.org.example:bad", Name: api.CHAPSecret, Secret: api.NewSecret([]byte(secrets[0]))}))
	note(c.Login(ctx, api.LoginRequest{Target: "iqn.2003-01.org.example:bad"}))
	note(c.Login(ctx, api.LoginRequest{Target: iqn}))
	note(c.Nodes(ctx, api.NodeFilter{}))
	note(c.Portals(ctx))
	note(c.Sessions(ctx))
	note(c.Devices(ctx))
	note(c.Status(ctx))
	if asked := l.Plane.Asked(); string(asked[len(asked)-1].TargetSecret.Reveal()) != secrets[1] {
		t.Fatal("the secrets did not get to the data plane: this test looks for nothing")
	}
	texts := map[string][]byte{"log": []byte(l.log.String())}
	b, err := json.Marshal(answers)
	if err != nil {
		t.Fatal(err)
	}
	texts["answers"] = b
	stored := 0
	err = filepath.WalkDir(l.Dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		b, err := os.ReadFile(path)
		if strings.Contains(path, "/secrets/") {
			stored++
			if fi, err := e.Info(); err != nil || fi.Mode().Perm() != 0o600 || !bytes.Contains(b, []byte("chap_secret")) {
				t.Errorf("%s: %v, %v", path, fi.Mode(), err)
			}
			return nil
		}
		texts[path] = b
		return err
	})
	if err != nil || stored != 3 || len(texts) < 6 {
		t.Fatalf("%v; %d files of secrets, %d others", err, stored, len(texts))
	}
	for name, text := range texts {
		for _, s := range secrets {
			for _, form := range []string{s, base64.StdEncoding.EncodeToString([]byte(s)), hex.EncodeToString([]byte(s))} {
				if bytes.Contains(text, []byte(form)) {
					t.Errorf("%s shows %q", name, s)
				}
			}
		}
	}
	if _, err := d.Logout(ctx, api.LogoutRequest{Session: iqn}); err != nil {
		t.Fatal(err)
	}
}

// No answer and no state has a place for a secret.
func TestAnswersHoldNoSecret(t *testing.T) {
	secret := reflect.TypeFor[api.Secret]()
	seen := map[reflect.Type]bool{}
	var walk func(path string, x reflect.Type)
	walk = func(path string, x reflect.Type) {
		if x == secret {
			t.Errorf("%s is a secret", path)
		}
		if seen[x] {
			return
		}
		seen[x] = true
		switch x.Kind() {
		case reflect.Pointer, reflect.Slice, reflect.Array, reflect.Map:
			walk(path, x.Elem())
		case reflect.Struct:
			for i := range x.NumField() {
				walk(path+"."+x.Field(i).Name, x.Field(i).Type)
			}
		}
	}
	for _, v := range []any{
		api.NodesReply{}, api.PortalsReply{}, api.SessionsReply{}, api.DevicesReply{}, api.TargetsReply{}, api.LoginReply{}, api.LogoutReply{}, api.StatusReply{},
		api.FirmwareReply{}, api.BuffersReply{}, ipc.State{}, ipc.HelloReply{},
	} {
		walk(reflect.TypeOf(v).Name(), reflect.TypeOf(v))
	}
	if !seen[reflect.TypeFor[ipc.Group]()] {
		t.Error("the walk does not reach a group")
	}
}
