// Package version holds the version that the build gave the programs.
package version

import "runtime/debug"

// number is set by the linker: -ldflags "-X iserd.org/iserd/internal/version.number=...", as `git describe` prints it.
var number string

// String returns the version, or "devel" with what the Go tool knows of the source.
func String() string {
	if number != "" {
		return number
	}
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" && len(s.Value) >= 12 {
				return "devel-" + s.Value[:12]
			}
		}
	}
	return "devel"
}
