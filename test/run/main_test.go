package main

import (
	"slices"
	"strings"
	"testing"
)

func TestMissing(t *testing.T) {
	r := &runner{out: new(strings.Builder)}
	err := r.pass(strings.NewReader(`{"Action":"skip","Package":"p","Test":"TestGuest/s/TestCut/a"}
{"Action":"skip","Package":"p","Test":"TestGuest/s/TestCut"}
{"Action":"pass","Package":"p","Test":"TestGuest/s/TestCut#01"}
{"Action":"skip","Package":"p","Test":"TestGuest/s/TestCutTwice"}
{"Action":"skip","Package":"p","Test":"TestOther"}
{"Action":"pass","Package":"q","Test":"TestOther#01"}
{"Action":"output","Package":"p","Test":"TestOther","Output":"\"Action\":\"skip\""}
{"Action":"skip","Package":"no tests"}
`))
	if want := []string{"p.TestGuest/s/TestCutTwice", "p.TestOther"}; err != nil || !slices.Equal(r.missing(), want) {
		t.Errorf("%v, %v; want %v", r.missing(), err, want)
	}
}
