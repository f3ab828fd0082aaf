package config

import (
	"bytes"
	"errors"
	"fmt"
	"strings"

	"github.com/pelletier/go-toml/v2/unstable"
	"github.com/spf13/viper"

	"iserd.org/iserd/api"
)

// setting is one option as one file sets it.
type setting struct {
	option *Option
	value  any
	line   int
}

// parse reads one file. What is wrong does not hide what comes after it: a line that is no TOML is left out, and so is a table.
func parse(file string, text []byte) (settings []setting, problems []api.ConfigProblem) {
	first := 1 // the line with which the rest begins
	add := func(line int, option, format string, args ...any) {
		text := strings.Join(strings.Fields(fmt.Sprintf(format, args...)), " ")
		problems = append(problems, api.ConfigProblem{Origin: api.ConfigOrigin{Kind: api.OriginFile, Name: file, Line: line}, Option: option, Text: text})
	}
	seen := make(map[string]int) // lines of keys
	table := false               // what follows is in a table
	for rest := append(bytes.Clone(text), '\n'); len(rest) > 0; {
		list, bad, err := expressions(rest)
		for i, x := range list {
			end := bad
			if i+1 < len(list) {
				end = list[i+1].line
			}
			line := first + x.line
			switch {
			case x.line == bad: // the line as a whole is wrong
			case x.table:
				table = true
				add(line, "", "unknown table %s: there are no tables here", quote(strings.Join(x.key, ".")))
			case table: // it is the table that is wrong
			case len(x.key) > 1 || find(x.key[0]) == nil:
				add(line, "", "unknown key %s%s", quote(strings.Join(x.key, ".")), hint(strings.Join(x.key, ".")))
			case seen[x.key[0]] != 0:
				add(line, x.key[0], "%s is set a second time, first in line %d", x.key[0], seen[x.key[0]])
			default:
				o := find(x.key[0])
				seen[o.Name] = line
				v, err := decode(o, lines(rest, x.line, end))
				if err == nil {
					v, err = o.fromFile(v)
				}
				if err != nil {
					add(line, o.Name, "%v", err)
					continue
				}
				settings = append(settings, setting{o, v, line})
			}
		}
		if err == nil {
			break
		}
		add(first+bad, "", "this is no TOML: %v", err)
		skipped := lines(rest, 0, bad+1)
		first += bad + 1
		rest = rest[len(skipped):]
	}
	return settings, problems
}

// expression is the place of a key and its value, or of a table. Lines count from 0.
type expression struct {
	key   []string
	table bool
	line  int
}

// expressions goes through a text as far as it is TOML. bad is the line that is not, the number of lines if all are.
func expressions(text []byte) (list []expression, bad int, err error) {
	var p unstable.Parser
	p.Reset(text)
	for p.NextExpression() {
		e := p.Expression()
		x := expression{table: e.Kind != unstable.KeyValue, line: -1}
		for it := e.Key(); it.Next(); {
			k := it.Node()
			x.key = append(x.key, string(k.Data))
			if x.line < 0 {
				x.line = bytes.Count(text[:k.Raw.Offset], newline)
			}
		}
		list = append(list, x)
	}
	if err = p.Error(); err == nil {
		return list, bytes.Count(text, newline), nil
	}
	var pe *unstable.ParserError
	if !errors.As(err, &pe) {
		return list, 0, err
	}
	// The end of the text counts as its last line.
	return list, min(bytes.Count(text[:p.Range(pe.Highlight).Offset], newline), bytes.Count(text, newline)-1), err
}

var newline = []byte("\n")

// lines gives the lines of a text from the one up to the other.
func lines(text []byte, from, to int) []byte {
	for ; from > 0; from, to = from-1, to-1 {
		text = text[bytes.IndexByte(text, '\n')+1:]
	}
	n := 0
	for ; to > 0; to-- {
		n += bytes.IndexByte(text[n:], '\n') + 1
	}
	return text[:n]
}

// decode reads the value of one option.
func decode(o *Option, text []byte) (any, error) {
	v := viper.NewWithOptions(viper.KeyDelimiter("::"))
	v.SetConfigType("toml")
	if err := v.ReadConfig(bytes.NewReader(text)); err != nil {
		var pe viper.ConfigParseError
		if errors.As(err, &pe) {
			err = pe.Unwrap()
		}
		return nil, fmt.Errorf("%s cannot be read: %s; %s", o.Name, strings.TrimPrefix(err.Error(), "toml: "), o.expected())
	}
	return v.Get(o.Name), nil
}

// hint helps with a key that there is not.
func hint(key string) string {
	low := strings.ToLower(key)
	if strings.Contains(low, "secret") || strings.Contains(low, "password") || strings.HasPrefix(low, "chap") {
		return "; secrets are no options, see: iserctl node secret --help"
	}
	best, most := "", 3 // a distance that is a slip
	for _, o := range Options {
		if d := distance(strings.ReplaceAll(low, "-", "_"), o.Name); d < most {
			best, most = o.Name, d
		}
	}
	if best != "" {
		return ", is it " + best + "?"
	}
	return ""
}

// distance counts the letters that have to be added, left out or replaced to make b of a.
func distance(a, b string) int {
	if len(a) > 2*len(b) {
		return len(a)
	}
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		left, corner := i+1, row[0]
		row[0] = left
		for j := range len(b) {
			cost := 1
			if a[i] == b[j] {
				cost = 0
			}
			left = min(left+1, row[j+1]+1, corner+cost)
			corner, row[j+1] = row[j+1], left
		}
	}
	return row[len(b)]
}
