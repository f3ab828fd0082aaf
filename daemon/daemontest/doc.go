// Package daemontest plays the data plane, the block driver and the targets for tests of the control plane, and judges it: an order of calls
// that would hang or leak on a real machine (START_DEV before the queues fetch, DEL_DEV before the character device is closed, a detach of a
// live device) is an error that the tests see.
package daemontest
