// Package profile attributes every instruction that a guest executes to a place in the code: a program, a kernel module, or a part of the
// kernel. A plugin of QEMU counts translated blocks by their address; the symbol tables of the guest's kernel and of the data plane, and the
// memory maps of the processes, tell what the addresses are.
//
// # Limits
//
// An address is all that is known of an instruction. Code that several parties use (the scheduler, locks, memory allocation) is a place of its
// own and cannot be split among them. Programs at fixed addresses cannot be told apart: what runs at those of iserd-io is taken for iserd-io,
// and nothing else with such addresses has more than a few instructions to run meanwhile. A block that an interrupt cut short counts whole.
package profile
