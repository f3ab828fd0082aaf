// Package config reads the settings of the control plane. options.go has the table of the options, file.go reads one file, config.go puts the
// layers together.
//
// Later layers win: built-in defaults, /usr/lib/iserd/iserd.toml (the vendor's), /etc/iserd/iserd.toml, /etc/iserd/iserd.toml.d/*.toml in
// lexical order, the environment (ISERD_LOGIN_TIMEOUT for login_timeout), flags (--login-timeout). viper holds the layers; each option keeps its
// origin. What is wrong is an error that names its place, whatever layer would win: a misspelt option must not be a silent default. All that is
// wrong is told at once.
//
// Trap: viper lower-cases keys and splits them at dots, so an iSCSI name can never be a key here. It does not say where a value stood either;
// hence file.go, which goes through the expressions of a file with the parser that viper uses, too.
package config
