// Package report keeps the benchmark's results and makes tables, verdicts and plots of them.
//
// results.json holds every run of every cell as it was measured, with the versions it was measured with; all else in docs/performance that
// is not written by hand is made of it. A cell that is measured again replaces what was there of it.
package report
