package main

import (
	"bytes"
	"os"

	"github.com/coreos/go-systemd/v22/journal"
	"github.com/sirupsen/logrus"
)

// newLogger logs to standard error: text with times for people, and without times but with priorities where the journal reads it.
func newLogger(level string) *logrus.Logger {
	l := logrus.New()
	l.SetLevel(levelOf(level))
	l.SetOutput(os.Stderr)
	l.SetFormatter(&logrus.TextFormatter{FullTimestamp: true})
	if ok, err := journal.StderrIsJournalStream(); err == nil && ok {
		l.SetFormatter(journalFormatter{&logrus.TextFormatter{DisableTimestamp: true, DisableColors: true}})
	}
	return l
}

// levelOf converts a level that the configuration has checked.
func levelOf(s string) logrus.Level {
	l, err := logrus.ParseLevel(s)
	if err != nil {
		return logrus.InfoLevel
	}
	return l
}

// journalFormatter puts the priority in front of the line, as sd-daemon(3) describes. Writing to standard error instead of the journal's
// socket keeps the order with what else the process prints.
type journalFormatter struct{ next logrus.Formatter }

func (f journalFormatter) Format(e *logrus.Entry) ([]byte, error) {
	b, err := f.next.Format(e)
	if err != nil {
		return nil, err
	}
	p := "<6>"
	switch e.Level {
	case logrus.PanicLevel, logrus.FatalLevel:
		p = "<2>"
	case logrus.ErrorLevel:
		p = "<3>"
	case logrus.WarnLevel:
		p = "<4>"
	case logrus.DebugLevel, logrus.TraceLevel:
		p = "<7>"
	case logrus.InfoLevel:
	}
	return append([]byte(p), bytes.TrimLeft(b, " ")...), nil
}
