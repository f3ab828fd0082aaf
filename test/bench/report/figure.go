package report

import "math"

// Figure is one value over the runs of a cell, ascending. It may be empty.
type Figure []float64

// Known tells whether it was measured.
func (f Figure) Known() bool { return len(f) > 0 }

// Median returns the middle value, the mean of the two middle ones of an even number, and NaN of none.
func (f Figure) Median() float64 {
	n := len(f)
	switch {
	case n == 0:
		return math.NaN()
	case n%2 == 1:
		return f[n/2]
	}
	return (f[n/2-1] + f[n/2]) / 2
}

// Min and Max are the ends of the range; NaN of none.
func (f Figure) Min() float64 {
	if len(f) == 0 {
		return math.NaN()
	}
	return f[0]
}

// Max returns the largest value.
func (f Figure) Max() float64 {
	if len(f) == 0 {
		return math.NaN()
	}
	return f[len(f)-1]
}

// Ratio is a figure of ours divided by the peer's.
type Ratio struct {
	Value float64 // of the medians
	// Distinct tells that the ranges do not overlap. If they do, the runs do not show that there is a difference.
	Distinct bool
}

// Divide compares two figures; both must be known.
func Divide(ours, peer Figure) Ratio {
	return Ratio{Value: ours.Median() / peer.Median(), Distinct: ours.Min() > peer.Max() || ours.Max() < peer.Min()}
}
