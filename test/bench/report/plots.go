package report

import (
	"fmt"
	"image/color"
	"math"
	"os"
	"path/filepath"
	"strings"

	"gonum.org/v1/plot"
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

// panel is one of the plots that stand side by side.
type panel struct {
	title, x, y string
	ticks       []plot.Tick // of the logarithmic x axis
	logY        bool
	curves      []curve
}

// Size of a panel.
const (
	panelWidth  = 13 * vg.Centimeter
	panelHeight = 10 * vg.Centimeter
)

// draw makes gonum's plot of the panel. One without curves is nil.
func (p panel) draw() (*plot.Plot, error) {
	out := plot.New()
	out.Title.Text, out.X.Label.Text, out.Y.Label.Text = p.title, p.x, p.y
	out.X.Scale, out.X.Tick.Marker = plot.LogScale{}, plot.ConstantTicks(p.ticks)
	out.Legend.Top, out.Legend.Left = true, true
	out.Add(plotter.NewGrid())
	low, high, drawn := math.Inf(1), math.Inf(-1), false
	for _, c := range p.curves {
		if len(c.points) == 0 {
			continue
		}
		xys := make(plotter.XYs, len(c.points))
		for i, q := range c.points {
			xys[i].X, xys[i].Y = q.x, q.y
			low, high = min(low, q.y), max(high, q.y)
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
		drawn = true
	}
	if !drawn {
		return nil, nil
	}
	if p.logY {
		out.Y.Scale, out.Y.Tick.Marker = plot.LogScale{}, plot.TickerFunc(decades)
		// Room for the legend, which stands on the upper left.
		out.Y.Min, out.Y.Max = math.Pow(10, math.Floor(math.Log10(low))), math.Pow(10, math.Ceil(math.Log10(high)+0.5))
	} else {
		out.Y.Min, out.Y.Max = 0, high*1.5
	}
	return out, nil
}

// decades ticks a logarithmic axis at 1, 2 and 5 of each power of ten.
func decades(low, high float64) []plot.Tick {
	var t []plot.Tick
	for e := math.Floor(math.Log10(low)); ; e++ {
		for _, m := range []float64{1, 2, 5} {
			v := m * math.Pow(10, e)
			if v > high*1.0001 {
				return t
			}
			if v >= low*0.9999 {
				t = append(t, plot.Tick{Value: v, Label: fmt.Sprintf("%g", v)})
			}
		}
	}
}

// save writes panels side by side as one SVG. Without anything to draw it writes nothing.
func save(file string, panels ...panel) error {
	var row []*plot.Plot
	for _, p := range panels {
		d, err := p.draw()
		if err != nil {
			return err
		}
		if d != nil {
			row = append(row, d)
		}
	}
	if len(row) == 0 {
		return nil
	}
	canvas := vgsvg.New(vg.Length(len(row))*panelWidth, panelHeight)
	tiles := draw.Tiles{Rows: 1, Cols: len(row), PadX: vg.Points(12), PadTop: vg.Points(4), PadRight: vg.Points(8), PadBottom: vg.Points(4), PadLeft: vg.Points(4)}
	for i, c := range plot.Align([][]*plot.Plot{row}, tiles, draw.New(canvas))[0] {
		row[i].Draw(c)
	}
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	if _, err := canvas.WriteTo(f); err != nil {
		f.Close()
		return err
	}
	return f.Close()
}

// curve collects a value of an initiator over an axis; name gives the cell at a place of the axis.
func (r *Results) curve(c plan.Cell, axis []int, value func(name string, x int) float64, name func(x int) string) curve {
	out := curve{initiator: who(c)}
	for _, x := range axis {
		if v := value(name(x), x); !math.IsNaN(v) {
			out.points = append(out.points, point{float64(x), v})
		}
	}
	return out
}

// ticks labels the places of an axis.
func ticks(axis []int, label func(int) string) []plot.Tick {
	var t []plot.Tick
	for _, x := range axis {
		t = append(t, plot.Tick{Value: float64(x), Label: label(x)})
	}
	return t
}

// plots writes all plots into a folder.
func (r *Results) plots(dir string) error {
	number := func(n int) string { return fmt.Sprint(n) }
	var throughput, cpu []panel
	for _, d := range []string{"read", "write"} {
		a := panel{title: fmt.Sprintf("Throughput by block size, %s, depth %d", d, plan.SizesDepth), x: "block size, bytes", y: "MiB per 10⁹ instructions", logY: true,
			ticks: ticks(plan.Sizes, plan.SizeText)}
		b := panel{title: fmt.Sprintf("CPU of the data plane by block size, %s, depth %d", d, plan.SizesDepth), x: "block size, bytes",
			y: "thousands of instructions per I/O", ticks: a.ticks}
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
			logY: true, ticks: ticks(plan.Depths, number)}
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
	devices := panel{title: "Cost by number of devices, 4k read, depth 32", x: "devices present", y: "thousands of instructions per I/O, whole machine",
		ticks: ticks(plan.Counts, number)}
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
