package daemon

import "time"

// Hurry shortens what is repeated in the background. The function undoes it.
func Hurry(retry, watch time.Duration) (undo func()) {
	r, w := retryAfter, watchEvery
	retryAfter, watchEvery = retry, watch
	return func() { retryAfter, watchEvery = r, w }
}
