# iserd: build, try and test it. `make help` lists the targets.
#
# demo and the tests need root once, to install tools (make deps says which) and to build the guest's image. Neither starts a service on
# this host; targets, daemon and devices live in a QEMU guest. Downloads and the image are kept in ISERD_CACHE, by default
# /var/cache/iserd-testbed.

GO       ?= go
PREFIX   ?= /usr
DESTDIR  ?=
FUZZTIME ?= 10s
SOAK     ?= 15
SOAKED   ?= scenario:^Test((DataPlaneKilled|History|StaleWrite|ManyLogins)$$|Fault)
VERSION  := $(shell git describe --always --dirty 2>/dev/null || echo unknown)
LDFLAGS  := -X iserd.org/iserd/internal/version.number=$(VERSION)
PROGRAMS := iserd iserd-io iserctl

# Tests are run by this, which ends with one summary of all of them. It needs no entry in go.mod.
SUMMARY := $(GO) run gotest.tools/gotestsum@v1.13.0 --format testname --format-icons text --raw-command --
TESTBED := $(GO) run ./internal/testbed/cmd/testbed

.PHONY: all
all: build

.PHONY: help
help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: deps
deps: ## install what building and testing take and this host lacks (tools only; needs root when something is missing)
	@CGO_ENABLED=0 $(TESTBED) deps

.PHONY: build
build: deps ## build the programs into bin/
	@mkdir -p bin
	$(GO) build -trimpath -ldflags '$(LDFLAGS)' -o bin/ $(PROGRAMS:%=./cmd/%)

.PHONY: demo
demo: deps ## the whole job in a guest: target, discovery, login, file system, checksums, fio
	@$(GO) run ./test/demo

.PHONY: bench
bench: deps ## compare with the peers in a guest that counts instructions; BENCHFLAGS='-only iser/4k-qd32 -runs 1' measures a part
	@$(GO) run ./test/bench $(BENCHFLAGS)

.PHONY: test
test: deps ## every test: unit tests with the race detector, fuzz seeds, and the guest's
	@$(TESTBED) tgt
	@GUEST=1 $(SUMMARY) $(GO) run ./test/run $(TESTFLAGS)

.PHONY: test-unit
test-unit: deps ## the tests that run on any host, with the race detector
	@$(TESTBED) tgt
	@$(SUMMARY) $(GO) run ./test/run $(TESTFLAGS) unit

.PHONY: test-guest
test-guest: deps ## the tests that run in the guest; GUEST_RUN=package:expression picks some, GUEST_CONSOLE=1 shows its console
	@GUEST=1 $(SUMMARY) $(GO) run ./test/run $(TESTFLAGS) guest

.PHONY: soak
soak: deps ## the faults of docs/reliability.md under load, killed data planes, many logins, round after round; SOAK=50 does 50 (15)
	@GUEST=1 SOAK=$(SOAK) GUEST_RUN='$(SOAKED)' $(SUMMARY) $(GO) run ./test/run $(TESTFLAGS) guest

.PHONY: shell
shell: deps ## a shell in a fresh guest, with the programs in its PATH
	@$(TESTBED) shell

.PHONY: fuzz
fuzz: deps ## run every fuzz target for FUZZTIME (10s)
	@n=0; for p in $$($(GO) list ./...); do \
		list=$$($(GO) test -list '^Fuzz' $$p) || { echo "$$list"; exit 1; }; \
		for f in $$(echo "$$list" | grep '^Fuzz'); do \
			echo "== $$p $$f"; n=$$((n+1)); \
			$(GO) test -run '^$$' -fuzz "^$$f\$$" -fuzztime $(FUZZTIME) $$p || exit 1; \
		done; \
	done; echo "$$n fuzz targets"; test $$n -gt 0

.PHONY: lint
lint: deps ## formatting and go vet, with cgo and without
	@out=$$(gofmt -l $$(git ls-files '*.go')); [ -z "$$out" ] || { echo "gofmt is needed for:"; echo "$$out"; exit 1; }
	CGO_ENABLED=1 $(GO) vet ./...
	CGO_ENABLED=0 $(GO) vet ./...

.PHONY: install
install: build ## install the programs below DESTDIR and PREFIX (/usr)
	install -D -m 755 -t $(DESTDIR)$(PREFIX)/sbin $(PROGRAMS:%=bin/%)

.PHONY: clean
clean: ## remove what make built; the cache of the guest stays
	rm -rf bin
