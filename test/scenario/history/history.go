// Package history records what readers and writers of a block device do, and tells whether blocks that keep what they are given could have made them see
// what they saw: every operation takes effect at one moment between its call and its return, and a read returns what the write before it left (linearizability,
// checked block by block with porcupine).
//
// A write fills its block with one value that no other write has. A target may carry out a write and a read of one block piece by piece, so each word of
// 8 bytes is a register of its own. Most are read alike, and those that always were are checked once.
//
// A write that failed may have been carried out or not. The check comes in two strengths, see [Log.Check].
package history

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"sort"
	"strings"
	"sync"
	"time"

	"github.com/anishathalye/porcupine"
)

// wordSize is the size of what a target is trusted to read and write in one piece, bytes.
const wordSize = 8

// Op is one operation on one block.
type Op struct {
	Client       int
	Block        int
	Write        bool
	Failed       bool          // it returned an error
	Value        uint64        // written, or read: of every word, unless Words says otherwise
	Words        []uint64      // of a read that found different values; nil otherwise
	Call, Return time.Duration // on one clock
}

// Log records operations. Its methods may be called from several goroutines.
type Log struct {
	start time.Time

	mu   sync.Mutex // guards what follows
	last uint64     // value given out
	ops  []Op
}

// New makes an empty log.
func New() *Log { return &Log{start: time.Now()} }

// Write records a write: f puts data into the block.
func (l *Log) Write(client, block int, data []byte, f func() error) error {
	l.mu.Lock()
	l.last++
	op := Op{Client: client, Block: block, Write: true, Value: l.last}
	l.mu.Unlock()
	for i := 0; i < len(data); i += wordSize {
		binary.LittleEndian.PutUint64(data[i:], op.Value)
	}
	return l.record(op, nil, f)
}

// Read records a read: f puts what the block holds into data.
func (l *Log) Read(client, block int, data []byte, f func() error) error {
	return l.record(Op{Client: client, Block: block}, data, f)
}

func (l *Log) record(op Op, read []byte, f func() error) error {
	op.Call = time.Since(l.start)
	err := f()
	op.Return = time.Since(l.start)
	op.Failed = err != nil
	if read != nil && err == nil {
		op.Value, op.Words = words(read)
	}
	l.mu.Lock()
	l.ops = append(l.ops, op)
	l.mu.Unlock()
	return err
}

// words returns what a block holds: one value, or one for each word.
func words(b []byte) (value uint64, all []uint64) {
	value = binary.LittleEndian.Uint64(b)
	for i := 0; i < len(b); i += wordSize {
		all = append(all, binary.LittleEndian.Uint64(b[i:]))
	}
	if !slices.ContainsFunc(all, func(w uint64) bool { return w != value }) {
		return value, nil
	}
	return value, all
}

// Take returns what was recorded and forgets it. Values stay unique.
func (l *Log) Take() []Op {
	l.mu.Lock()
	defer l.mu.Unlock()
	ops := l.ops
	l.ops = nil
	return ops
}

// Strength says what a write that failed may still do.
type Strength bool

const (
	// Late: it takes effect at any time after its call, or never. This is what an error leaves open to a program that knows nothing of the device.
	Late Strength = false

	// Fenced: it has taken effect before it returned, or never does.
	Fenced Strength = true
)

func (s Strength) String() string {
	if s == Fenced {
		return "failed writes do not take effect later"
	}
	return "failed writes may take effect later"
}

// checkLimit is how long the check of one register may take. It is over within a second unless there is a great number of failed writes.
const checkLimit = 2 * time.Minute

// Check returns an error, a [*Violation] as a rule, when blocks cannot have made the operations see what they saw. Every block was filled with 0 before.
func Check(ops []Op, strength Strength) error {
	blocks := map[int][]Op{}
	for _, op := range ops {
		blocks[op.Block] = append(blocks[op.Block], op)
	}
	for block, list := range blocks {
		for _, word := range distinct(list) {
			register := operations(list, word, strength)
			model := model(strength)
			switch porcupine.CheckOperationsTimeout(model, register, checkLimit) {
			case porcupine.Ok:
			case porcupine.Illegal:
				return &Violation{Block: block, Word: word, Ops: len(register), Strength: strength, model: model, register: register}
			default:
				return fmt.Errorf("block %d, word %d: the check of %d operations has no end within %v", block, word, len(register), checkLimit)
			}
		}
	}
	return nil
}

// distinct returns words of a block so that every other one was always read like one of them.
func distinct(ops []Op) []int {
	ops = slices.DeleteFunc(slices.Clone(ops), func(op Op) bool { return op.Words == nil })
	if len(ops) == 0 {
		return []int{0}
	}
	var list []int
	seen := map[string]bool{}
	for word := range ops[0].Words {
		var key []byte
		for _, op := range ops {
			key = binary.LittleEndian.AppendUint64(key, op.Words[word])
		}
		if !seen[string(key)] {
			seen[string(key)] = true
			list = append(list, word)
		}
	}
	return list
}

// operations are those of one word of a block, as porcupine takes them. A read that failed tells nothing.
func operations(ops []Op, word int, strength Strength) []porcupine.Operation {
	var list []porcupine.Operation
	for _, op := range ops {
		if op.Failed && !op.Write {
			continue
		}
		if op.Words != nil {
			op.Value = op.Words[word]
		}
		end := int64(op.Return)
		if op.Failed && strength == Late {
			end = math.MaxInt64 // taking effect behind everything else is as good as never
		}
		list = append(list, porcupine.Operation{ClientId: op.Client, Input: op, Call: int64(op.Call), Return: end})
	}
	return list
}

// model is a register. What a fenced write that failed has done is open, so there may be several states it can be in.
func model(strength Strength) porcupine.Model {
	m := porcupine.NondeterministicModel{
		Init: func() []any { return []any{uint64(0)} },
		Step: func(state, input, _ any) []any {
			op := input.(Op)
			switch {
			case op.Write && op.Failed && strength == Fenced:
				return []any{state, op.Value}
			case op.Write:
				return []any{op.Value}
			case op.Value == state.(uint64):
				return []any{state}
			}
			return nil
		},
		Hash: func(state any) uint64 { return state.(uint64) },
		DescribeOperation: func(input, _ any) string {
			op := input.(Op)
			switch {
			case op.Write && op.Failed:
				return fmt.Sprintf("write %d fails", op.Value)
			case op.Write:
				return fmt.Sprintf("write %d", op.Value)
			}
			return fmt.Sprintf("read %d", op.Value)
		},
		DescribeState: func(state any) string { return fmt.Sprint(state) },
	}
	return m.ToModel()
}

// Violation is a history that no register explains.
type Violation struct {
	Block, Word int
	Ops         int // of this block
	Strength    Strength

	model    porcupine.Model
	register []porcupine.Operation
}

func (v *Violation) Error() string {
	return fmt.Sprintf("block %d, word %d: no order of its %d operations explains what was read (%v)", v.Block, v.Word, v.Ops, v.Strength)
}

// Tell names the operation that nothing explains any more, the first one to return, and what was under way or had just been done on its block then.
func (v *Violation) Tell() string {
	list := slices.Clone(v.register)
	slices.SortFunc(list, func(a, b porcupine.Operation) int { return cmp.Compare(a.Return, b.Return) })
	first := sort.Search(len(list)-1, func(i int) bool {
		return porcupine.CheckOperationsTimeout(v.model, until(list, list[i].Return), checkLimit) == porcupine.Illegal
	})
	bad := list[first]
	var b strings.Builder
	fmt.Fprintf(&b, "%s is not explained. Before it:", tell(v.model, bad))
	for _, op := range list[max(0, first-before):first] {
		fmt.Fprintf(&b, "\n%s", tell(v.model, op))
	}
	for _, op := range list[first+1:] {
		if op.Call <= bad.Return {
			fmt.Fprintf(&b, "\n%s, still under way", tell(v.model, op))
		}
	}
	return b.String()
}

// before is how many operations before the one that is not explained are told.
const before = 24

// until is what had been seen at a moment: reads that had returned, and writes that had been called, which may have been carried out or not if they had
// not returned.
func until(list []porcupine.Operation, moment int64) (seen []porcupine.Operation) {
	for _, op := range list {
		if op.Return > moment {
			if !op.Input.(Op).Write || op.Call > moment {
				continue
			}
			op.Return = math.MaxInt64
		}
		seen = append(seen, op)
	}
	return seen
}

func tell(m porcupine.Model, op porcupine.Operation) string {
	return fmt.Sprintf("client %d, %v to %v: %s", op.ClientId, time.Duration(op.Call), op.Input.(Op).Return, m.DescribeOperation(op.Input, nil))
}

// Draw writes a page that shows the history and how far it can be explained.
func (v *Violation) Draw(path string) error {
	_, info := porcupine.CheckOperationsVerbose(v.model, v.register, checkLimit)
	return porcupine.VisualizePath(v.model, info, path)
}
