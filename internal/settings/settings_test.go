package settings

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"strings"
	"testing"

	"iserd.org/iserd/api"
	"iserd.org/iserd/iscsi/login"
	"iserd.org/iserd/rdma"
)

func TestAuth(t *testing.T) {
	secret, target := api.NewSecret([]byte("one")), api.NewSecret([]byte("two"))
	a := Auth(&api.Settings{Auth: api.AuthCHAP, CHAPAlgorithms: api.CHAPAlgorithmNames, CHAPTargetUser: "storage", CHAPPolicy: api.PolicyStrong}, secret, target, "iqn.x")
	if a.User != "iqn.x" || a.TargetUser != "storage" || !a.Required || !a.Strong || !a.Secret.Equal(login.NewSecret([]byte("one"))) ||
		!a.TargetSecret.Equal(login.NewSecret([]byte("two"))) {
		t.Errorf("%+v", a)
	}
	for i, want := range []login.CHAPAlgorithm{login.CHAPMD5, login.CHAPSHA1, login.CHAPSHA256, login.CHAPSHA3256} {
		if a.Algorithms[i] != want {
			t.Errorf("%s is %v", api.CHAPAlgorithmNames[i], a.Algorithms[i])
		}
	}
	if a = Auth(&api.Settings{Auth: api.AuthNone}, secret, target, "iqn.x"); !a.Secret.IsZero() || !a.TargetSecret.IsZero() {
		t.Error("secrets are offered although none are to be used")
	}
}

func TestBinding(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	b := BindingOf(&api.Settings{SourceAddress: "127.0.0.9", NetworkInterface: "lo"})
	c, err := b.Dialer().DialContext(context.Background(), "tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if got := c.LocalAddr().(*net.TCPAddr).IP.String(); got != "127.0.0.9" {
		t.Errorf("from %s", got)
	}
	if _, err := BindingOf(&api.Settings{NetworkInterface: "none0"}).Dialer().DialContext(context.Background(), "tcp", l.Addr().String()); err == nil ||
		!strings.Contains(err.Error(), "none0") {
		t.Errorf("through an interface that is not there: %v", err)
	}
	local := netip.MustParseAddr("127.0.0.1")
	for _, x := range []struct {
		settings api.Settings
		want     string
		err      error
	}{
		{api.Settings{}, "invalid IP", nil},
		{api.Settings{SourceAddress: "10.0.0.1", NetworkInterface: "lo", RDMADevice: "x"}, "10.0.0.1", nil},
		{api.Settings{NetworkInterface: "lo"}, "127.0.0.1", nil},
		{api.Settings{NetworkInterface: "none0"}, "invalid IP", rdma.ErrNoDevice},
	} {
		b := BindingOf(&x.settings)
		if got, err := b.Source(local); got.String() != x.want || !errors.Is(err, x.err) {
			t.Errorf("%+v: %v, %v", x.settings, got, err)
		}
	}
	if _, err := BindingOf(&api.Settings{RDMADevice: "none0"}).Source(local); err == nil {
		t.Error("a device that is not there")
	}
	if err := BindingOf(&api.Settings{RDMADevice: "rxe0"}).Check("rxe1"); !errors.Is(err, rdma.ErrNoDevice) {
		t.Error(err)
	}
	if BindingOf(&api.Settings{RDMADevice: "rxe0"}).Check("rxe0") != nil || BindingOf(&api.Settings{}).Check("rxe1") != nil {
		t.Error("the right device is refused")
	}
}
