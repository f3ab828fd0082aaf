package report

import (
	"bytes"
	"fmt"
	"image/color"
	"math"
	"os"
	"path/filepath"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"

	"iserd.org/iserd/test/bench/plan"
)

// Colours that people with any colour vision can tell apart (Okabe and Ito), by initiator.
var colours = map[string]color.Color{
	"iserd, iSER, shared memory": color.RGBA{0xd5, 0x5e, 0x00, 0xff},
	"iserd, iSER":                color.RGBA{0xe6, 0x9f, 0x00, 0xff},
	"ib_iser":                    color.RGBA{0x00, 0x72, 0xb2, 0xff},
	"iserd, TCP":                 color.RGBA{0xcc, 0x79, 0xa7, 0xff},
	"iscsi_tcp":                  color.RGBA{0x00, 0x9e, 0x73, 0xff},
}

// point is a value at a place of the axis.
type point struct{ x, y float64 }

// curve is a line of a plot. Its colour is that of the initiator.
type curve struct {
	initiator, suffix string
	dashed            bool
	points            []point
}

// panel is one of the plots that stand side by side. Both axes are logarithmic, with what is drawn at the logarithm of its value: gonum's own
// logarithmic scale misplaces the label of the axis.
type panel struct {
	title, x, y string
	axis        []int // the places of the x axis
	label       func(int) string
	linear      bool // the y axis begins at 0
	curves      []curve
}

// Size of a panel.
const (
	panelWidth  = 13 * vg.Centimeter
	panelHeight = 10 * vg.Centimeter
)

// sans is the font of all text.
var sans = font.Font{Typeface: "Liberation", Variant: "Sans"}

// limits returns the range of all values of panels.
func limits(panels []panel) (low, high float64) {
	low, high = math.Inf(1), math.Inf(-1)
	for _, p := range panels {
		for _, c := range p.curves {
			for _, q := range c.points {
				low, high = min(low, q.y), max(high, q.y)
			}
		}
	}
	return low, high
}

// draw makes gonum's plot of the panel, for values from low to high.
func (p panel) draw(low, high float64) (*plot.Plot, error) {
	out := plot.New()
	out.Title.Text, out.X.Label.Text, out.Y.Label.Text = p.title, p.x, p.y
	out.Title.TextStyle.Font = font.From(sans, 12)
	for _, a := range []*plot.Axis{&out.X, &out.Y} {
		a.Label.TextStyle.Font, a.Tick.Label.Font = font.From(sans, 11), font.From(sans, 9)
	}
	out.Legend.TextStyle.Font = font.From(sans, 10)
	out.Legend.Top, out.Legend.Left, out.Legend.XOffs, out.Legend.YOffs, out.Legend.Padding = true, true, vg.Points(12), vg.Points(-8), vg.Points(2)
	out.Add(plotter.NewGrid())
	for _, c := range p.curves {
		if len(c.points) == 0 {
			continue
		}
		xys := make(plotter.XYs, len(c.points))
		for i, q := range c.points {
			xys[i].X, xys[i].Y = math.Log10(q.x), q.y
			if !p.linear {
				xys[i].Y = math.Log10(q.y)
			}
		}
		line, dots, err := plotter.NewLinePoints(xys)
		if err != nil {
			return nil, fmt.Errorf("plot %q: %w", p.title, err)
		}
		line.Width, line.Color, dots.Color = vg.Points(1.5), colours[c.initiator], colours[c.initiator]
		dots.Shape, dots.Radius = draw.CircleGlyph{}, vg.Points(2)
		if c.dashed {
			line.Dashes = []vg.Length{vg.Points(5), vg.Points(3)}
		}
		out.Add(line, dots)
		out.Legend.Add(c.initiator+c.suffix, line, dots)
	}
	var x []plot.Tick
	for _, n := range p.axis {
		x = append(x, plot.Tick{Value: math.Log10(float64(n)), Label: p.label(n)})
	}
	out.X.Tick.Marker, out.X.Min, out.X.Max = plot.ConstantTicks(x), x[0].Value, x[len(x)-1].Value
	if p.linear {
		out.Y.Min, out.Y.Max = 0, high*1.6 // room for the legend
		return out, nil
	}
	y := decades(low, high)
	out.Y.Tick.Marker, out.Y.Min, out.Y.Max = plot.ConstantTicks(y), y[0].Value, y[len(y)-1].Value
	return out, nil
}

// decades ticks a logarithmic axis at 1, 2 and 5 of the powers of ten, from the last tick below low to the second above high, so that there
// is room for the legend.
func decades(low, high float64) []plot.Tick {
	var t []plot.Tick
	above := 0
	for e := math.Floor(math.Log10(low)); ; e++ {
		for _, m := range []float64{1, 2, 5} {
			v := m * math.Pow(10, e)
			tick := plot.Tick{Value: math.Log10(v), Label: fmt.Sprintf("%g", v)}
			if v <= low {
				t = []plot.Tick{tick}
				continue
			}
			t = append(t, tick)
			if v > high {
				above++
			}
			if above == 2 {
				return t
			}
		}
	}
}

// save writes panels with one range of values side by side as an SVG. Without anything to draw it writes nothing.
func save(file string, panels ...panel) error {
	low, high := limits(panels)
	if low > high {
		return nil
	}
	var row []*plot.Plot
	for _, p := range panels {
		d, err := p.draw(low, high)
		if err != nil {
			return err
		}
		row = append(row, d)
	}
	canvas := vgsvg.New(vg.Length(len(row))*panelWidth, panelHeight)
	tiles := draw.Tiles{Rows: 1, Cols: len(row), PadX: vg.Points(12), PadTop: vg.Points(4), PadRight: vg.Points(12), PadBottom: vg.Points(4), PadLeft: vg.Points(4)}
	for i, c := range plot.Align([][]*plot.Plot{row}, tiles, draw.New(canvas))[0] {
		row[i].Draw(c)
	}
	var b bytes.Buffer
	if _, err := canvas.WriteTo(&b); err != nil {
		return err
	}
	// Whoever lacks that font shall not get one with serifs.
	text := strings.ReplaceAll(b.String(), "font-family:Liberation Sans;", "font-family:Liberation Sans,Arial,Helvetica,sans-serif;")
	return os.WriteFile(file, []byte(text), 0o644)
}

// curve collects a value of an initiator over an axis; name gives the cell at a place of the axis.
func (r *Results) curve(c plan.Cell, axis []int, value func(name string, x int) float64, name func(x int) string) curve {
	out := curve{initiator: who(c)}
	for _, x := range axis {
		if v := value(name(x), x); v > 0 { // it is NaN when it was not measured
			out.points = append(out.points, point{float64(x), v})
		}
	}
	return out
}

// plots writes all plots into a folder.
func (r *Results) plots(dir string) error {
	number := func(n int) string { return fmt.Sprint(n) }
	var throughput, cpu []panel
	for _, d := range []string{"read", "write"} {
		a := panel{title: fmt.Sprintf("Throughput by block size, %s, depth %d", d, plan.SizesDepth), x: "block size, bytes", y: "MiB per 10⁹ instructions",
			axis: plan.Sizes, label: plan.SizeText}
		b := panel{title: fmt.Sprintf("CPU of the data plane by block size, %s, depth %d", d, plan.SizesDepth), x: "block size, bytes",
			y: "thousands of instructions per I/O", axis: a.axis, label: a.label}
		for _, c := range columns {
			name := func(n int) string {
				return strings.Join([]string{"size", c.Transport, plan.SizeText(n), d, string(c.Initiator)}, "/")
			}
			a.curves = append(a.curves, r.curve(c, plan.Sizes, func(s string, n int) float64 { return r.Get(s, plan.IOPS).Median() * float64(n) / (1 << 20) }, name))
			b.curves = append(b.curves, r.curve(c, plan.Sizes, func(s string, _ int) float64 { return r.Get(s, plan.DaemonKinsn).Median() }, name))
		}
		throughput, cpu = append(throughput, a), append(cpu, b)
	}
	var latency []panel
	for _, t := range []string{"iser", "tcp"} {
		p := panel{title: "Latency by queue depth, 4k read, " + map[string]string{"iser": "iSER", "tcp": "TCP"}[t], x: "queue depth", y: "thousands of instructions",
			axis: plan.Depths, label: number}
		for _, c := range columns {
			if c.Transport != t {
				continue
			}
			name := func(n int) string { return fmt.Sprintf("depth/%s/%d/read/%s", t, n, c.Initiator) }
			for _, q := range []struct {
				value, suffix string
				dashed        bool
			}{{plan.LatP50, ", median", false}, {plan.LatP99, ", 99 %", true}} {
				line := r.curve(c, plan.Depths, func(s string, _ int) float64 { return r.Get(s, q.value).Median() }, name)
				line.suffix, line.dashed = q.suffix, q.dashed
				p.curves = append(p.curves, line)
			}
		}
		latency = append(latency, p)
	}
	devices := panel{title: "Cost by number of devices, 4k read, depth 32", x: "devices present", y: "thousands of instructions per I/O",
		axis: plan.Counts, label: number, linear: true}
	for _, c := range []plan.Cell{{Transport: "iser", Initiator: plan.Iserd}, {Transport: "iser", Initiator: plan.IbIser}} {
		for _, on := range []struct {
			name, suffix string
			dashed       bool
		}{{"one", ", I/O on one", false}, {"spread", ", I/O on all", true}} {
			line := r.curve(c, plan.Counts, func(s string, _ int) float64 { return r.Get(s, plan.Kinsn).Median() },
				func(n int) string { return fmt.Sprintf("devices/%d/%s/%s", n, on.name, c.Initiator) })
			line.suffix, line.dashed = on.suffix, on.dashed
			devices.curves = append(devices.curves, line)
		}
	}
	for _, p := range []struct {
		file   string
		panels []panel
	}{{"throughput.svg", throughput}, {"latency.svg", latency}, {"cpu.svg", cpu}, {"devices.svg", []panel{devices}}} {
		if err := save(filepath.Join(dir, p.file), p.panels...); err != nil {
			return err
		}
	}
	return nil
}
