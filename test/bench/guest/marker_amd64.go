package main

// markBegin makes the plugin of package profile set its counters to zero; without it, it does nothing.
func markBegin()

// markEnd makes the plugin write its counters.
func markEnd()
