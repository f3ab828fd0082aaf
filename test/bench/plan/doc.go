// Package plan names what the benchmark measures, and holds what its two halves tell each other: test/bench on the host, and
// test/bench/guest in the machine that counts instructions.
package plan
