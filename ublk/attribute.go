package ublk

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// QueueAttribute reads /sys/block/ublkbN/queue/NAME and, unless value is "", writes it. It gives what was there before.
//
// Writing some attributes, such as scheduler, waits without interrupt until the requests in flight are answered: not from the process that serves
// the device, and not while its requests are stuck.
//
// Errors: ErrNotFound when there is no block device of that number, ErrNotSupported when it has no such attribute.
func QueueAttribute(id int, name, value string) (old string, err error) {
	dir := filepath.Join("/sys/block", "ublkb"+strconv.Itoa(id))
	path := filepath.Join(dir, "queue", name)
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		if _, derr := os.Stat(dir); derr != nil {
			return "", fmt.Errorf("queue attribute %s: %w: %w", name, ErrNotFound, derr)
		}
		return "", fmt.Errorf("queue attribute %s: %w: %w", name, ErrNotSupported, err)
	}
	if err != nil {
		return "", fmt.Errorf("queue attribute %s: %w", name, err)
	}
	old = strings.TrimSpace(string(b))
	if value == "" {
		return old, nil
	}
	if err := os.WriteFile(path, []byte(value), 0); err != nil {
		return old, fmt.Errorf("queue attribute %s: %w", name, err)
	}
	return old, nil
}
