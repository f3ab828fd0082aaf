// Package config reads the settings of the control plane.
//
// Later sources win: built-in defaults, /usr/lib/iserd/iserd.toml (the vendor's), /etc/iserd/iserd.toml, /etc/iserd/iserd.d/*.toml in
// lexical order, the environment (ISERD_LOGIN_TIMEOUT for login_timeout), flags. A key that is not known is an error that names file
// and line: a misspelt option must not be a silent default.
//
// Trap: viper lower-cases keys and splits them at dots, so an iSCSI name can never be a key here.
package config
