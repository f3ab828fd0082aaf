package config

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/pflag"
	"github.com/spf13/viper"

	"iserd.org/iserd/api"
)

// Places are the files of a machine. A directory stands for the *.toml in it.
var Places = []string{"/usr/lib/iserd/iserd.toml", "/etc/iserd/iserd.toml", "/etc/iserd/iserd.toml.d"}

const envPrefix = "ISERD"

// Sources are the layers above the defaults.
type Sources struct {
	Files       []string // files and directories; one that is missing is fine
	Named       []string // so, but these have to be there
	Environment bool
	Flags       *pflag.FlagSet // as AddFlags made them; nil: none
}

// Loaded are settings, and where they come from.
type Loaded struct {
	Config  Config
	Origins map[string]api.ConfigOrigin // by the name of an option; what is missing is a default
	Files   []string                    // that were read, in order
}

// Problems is the error of a configuration with something wrong in it: one line with all of it.
type Problems []api.ConfigProblem

func (p Problems) Error() string {
	list := make([]string, len(p))
	for i := range p {
		list[i] = p[i].String()
	}
	return strings.Join(list, "; ")
}

// ProblemsOf gives the parts of an error of Load.
func ProblemsOf(err error) []api.ConfigProblem {
	var p Problems
	if errors.As(err, &p) {
		return p
	}
	return nil
}

// AddFlags makes a flag for every option.
func AddFlags(fl *pflag.FlagSet) {
	for i := range Options {
		o := &Options[i]
		unit := ""
		if o.Unit != "" {
			unit = " " + o.Unit
		}
		fl.String(o.Flag(), "", fmt.Sprintf("%s: %s%s (default: %s)", o.Help, o.Range(), unit, o.DefaultText()))
	}
}

// Load reads the settings. Its error is api.ErrInvalidArgs with Problems: all there are. What is right is returned even then.
func Load(src Sources) (Loaded, error) {
	l := Loaded{Config: Default(), Origins: make(map[string]api.ConfigOrigin), Files: []string{}}
	v := viper.NewWithOptions(viper.KeyDelimiter("::"))
	for i := range Options {
		v.SetDefault(Options[i].Name, Options[i].Default)
	}
	problems := l.readFiles(v, src)
	if src.Environment {
		problems = append(problems, l.readEnvironment(v)...)
	}
	problems = append(problems, l.readFlags(v, src.Flags)...)
	for i := range Options {
		Options[i].set(&l.Config, v.Get(Options[i].Name))
	}
	if c := &l.Config; c.SharedArena%c.SharedSlice != 0 {
		at := l.Origins["shared_arena"]
		if at.Name == "" {
			at = l.Origins["shared_slice"]
		}
		problems = append(problems, api.ConfigProblem{Origin: at, Option: "shared_arena",
			Text: fmt.Sprintf("shared_arena is %d, expected a multiple of shared_slice, which is %d (MiB)", c.SharedArena, c.SharedSlice)})
	}
	if len(problems) > 0 {
		return l, api.Errorf(api.ErrInvalidArgs, "configuration: %w", Problems(problems))
	}
	return l, nil
}

// readFiles adds the files. Each is checked as it is read, whatever comes after it.
func (l *Loaded) readFiles(v *viper.Viper, src Sources) (problems []api.ConfigProblem) {
	bad := func(name string, err error) {
		var pe *fs.PathError
		if errors.As(err, &pe) {
			err = pe.Err // the name is there already
		}
		problems = append(problems, api.ConfigProblem{Origin: api.ConfigOrigin{Kind: api.OriginFile, Name: name}, Text: err.Error()})
	}
	var files []string
	for i, p := range slices.Concat(src.Files, src.Named) {
		list, err := expand(p)
		if err != nil && (i >= len(src.Files) || !errors.Is(err, fs.ErrNotExist)) {
			bad(p, err)
		}
		files = append(files, list...)
	}
	for _, f := range files {
		text, err := readFile(f)
		if err != nil {
			bad(f, err)
			continue
		}
		l.Files = append(l.Files, f)
		settings, wrong := parse(f, text)
		problems = append(problems, wrong...)
		layer := make(map[string]any, len(settings))
		for _, s := range settings {
			layer[s.option.Name] = s.value
			l.Origins[s.option.Name] = api.ConfigOrigin{Kind: api.OriginFile, Name: f, Line: s.line}
		}
		if err := v.MergeConfigMap(layer); err != nil {
			bad(f, err)
		}
	}
	return problems
}

// expand replaces a directory by the *.toml in it, in lexical order.
func expand(path string) ([]string, error) {
	fi, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !fi.IsDir() {
		return []string{path}, nil
	}
	entries, err := os.ReadDir(path) // sorted by name
	var out []string
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), ".toml") {
			out = append(out, filepath.Join(path, e.Name()))
		}
	}
	return out, err
}

// maxFile bounds a file.
const maxFile = 1 << 20

func readFile(path string) ([]byte, error) {
	fi, err := os.Stat(path)
	switch {
	case err != nil:
		return nil, err
	case !fi.Mode().IsRegular():
		return nil, errors.New("not a file")
	case fi.Size() > maxFile:
		return nil, fmt.Errorf("%d bytes, expected at most %d", fi.Size(), maxFile)
	}
	return os.ReadFile(path)
}

// readEnvironment adds the variables that are not empty. Others with the prefix belong to other programs (ISERD_SOCKET to iserctl), unless they look
// like a slip.
func (l *Loaded) readEnvironment(v *viper.Viper) (problems []api.ConfigProblem) {
	for _, x := range os.Environ() {
		name, value, _ := strings.Cut(x, "=")
		key, ours := strings.CutPrefix(name, envPrefix+"_")
		if !ours || value == "" {
			continue
		}
		at := api.ConfigOrigin{Kind: api.OriginEnvironment, Name: name}
		i := slices.IndexFunc(Options, func(o Option) bool { return o.Variable() == name })
		if i < 0 {
			if h := hint(key); h != "" {
				problems = append(problems, api.ConfigProblem{Origin: at, Text: "there is no such option" + h})
			}
			continue
		}
		problems = append(problems, l.override(v, &Options[i], at, value)...)
	}
	return problems
}

// readFlags adds the flags that were given.
func (l *Loaded) readFlags(v *viper.Viper, fl *pflag.FlagSet) (problems []api.ConfigProblem) {
	if fl == nil {
		return nil
	}
	for i := range Options {
		o := &Options[i]
		if f := fl.Lookup(o.Flag()); f != nil && f.Changed {
			problems = append(problems, l.override(v, o, api.ConfigOrigin{Kind: api.OriginFlag, Name: "--" + o.Flag()}, f.Value.String())...)
		}
	}
	return problems
}

// override sets an option over what files say.
func (l *Loaded) override(v *viper.Viper, o *Option, at api.ConfigOrigin, text string) []api.ConfigProblem {
	value, err := o.fromText(text)
	if err != nil {
		return []api.ConfigProblem{{Origin: at, Option: o.Name, Text: err.Error()}}
	}
	v.Set(o.Name, value)
	l.Origins[o.Name] = at
	return nil
}
