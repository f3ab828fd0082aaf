package api

import (
	"bytes"
	"encoding/json"
	"fmt"
)

// What a changed option of the configuration waits for.
const (
	EffectNow       = "now"        // nothing: what begins from now on goes by it
	EffectLogin     = "login"      // logins from now on; sessions that are there keep what they have
	EffectDevice    = "device"     // devices that are made from now on
	EffectDataPlane = "data-plane" // the next start of the data plane: iserctl daemon upgrade
	EffectDaemon    = "daemon"     // the next start of the daemon, which no device notices
)

// Kinds of origins, in the order in which they go before each other.
const (
	OriginDefault     = "default"
	OriginFile        = "file"
	OriginEnvironment = "environment"
	OriginFlag        = "flag"
)

// ConfigOrigin is where the value of an option comes from.
type ConfigOrigin struct {
	Kind string `json:"kind"`           // OriginDefault, ...
	Name string `json:"name,omitempty"` // of the file, the variable or the flag
	Line int    `json:"line,omitempty"` // of the file; 0: the file as a whole
}

func (o ConfigOrigin) String() string {
	switch {
	case o.Name == "":
		return OriginDefault
	case o.Kind == OriginFile && o.Line == 0:
		return o.Name
	case o.Kind == OriginFile:
		return fmt.Sprintf("%s:%d", o.Name, o.Line)
	}
	return o.Kind + " " + o.Name
}

// ConfigValue is the value of an option as a configuration file has it: a number, or text. In JSON it is one or the other.
type ConfigValue struct {
	Text   string
	Number bool
}

func (v ConfigValue) String() string { return v.Text }

// MarshalJSON implements json.Marshaler.
func (v ConfigValue) MarshalJSON() ([]byte, error) {
	if v.Number {
		return []byte(v.Text), nil
	}
	return json.Marshal(v.Text)
}

// UnmarshalJSON implements json.Unmarshaler.
func (v *ConfigValue) UnmarshalJSON(b []byte) error {
	if v.Number = len(b) > 0 && b[0] != '"'; !v.Number {
		return json.Unmarshal(b, &v.Text)
	}
	var n json.Number
	d := json.NewDecoder(bytes.NewReader(b))
	d.UseNumber()
	err := d.Decode(&n)
	v.Text = n.String()
	return err
}

// ConfigProblem is something that is wrong with the configuration.
type ConfigProblem struct {
	Origin ConfigOrigin `json:"origin"`
	Option string       `json:"option,omitempty"` // "": it concerns none, or one that there is not
	Text   string       `json:"message"`
}

func (p ConfigProblem) String() string { return p.Origin.String() + ": " + p.Text }

// ConfigOption is one option as the daemon has it.
type ConfigOption struct {
	Name   string       `json:"name"`
	Value  ConfigValue  `json:"value"`
	Origin ConfigOrigin `json:"origin"`
	Effect string       `json:"effect"` // when a change counts: EffectNow, ...
	// InForce is what still holds while Value waits for Effect; nil when it does not wait.
	InForce *ConfigValue `json:"in_force,omitempty"`
	// Unknown: what holds is not known. No data plane runs, or it is too old to say what it was started with.
	Unknown bool `json:"unknown,omitempty"`
}

// ConfigChange is an option that has another value than before.
type ConfigChange struct {
	Name   string       `json:"name"`
	Old    ConfigValue  `json:"old"`
	New    ConfigValue  `json:"new"`
	Origin ConfigOrigin `json:"origin"` // of the new value
	Effect string       `json:"effect"` // when it counts
	// KeptBy are the targets with sessions, or the devices, that keep what they were made with, until the next login.
	KeptBy []string `json:"kept_by"`
}

// ConfigReply is the configuration of the daemon, and what its files and its environment say now.
type ConfigReply struct {
	Version int            `json:"version"`
	Files   []string       `json:"files"` // that were read, in order
	Options []ConfigOption `json:"options"`
	// Changes are what a reload would change now, and Problems what would keep it from doing so.
	Changes  []ConfigChange  `json:"changes"`
	Problems []ConfigProblem `json:"problems"`
}

// ReloadRequest has the daemon read its configuration again.
type ReloadRequest struct{}

// ReloadReply tells what has changed.
type ReloadReply struct {
	Version int            `json:"version"`
	Files   []string       `json:"files"`
	Changes []ConfigChange `json:"changes"`
}

// ConfigCheckReply is what is wrong with files.
type ConfigCheckReply struct {
	Version  int             `json:"version"`
	Files    []string        `json:"files"`
	Problems []ConfigProblem `json:"problems"`
}
