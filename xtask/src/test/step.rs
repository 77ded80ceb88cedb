//! The steps of `cargo xtask test`.

use clap::ValueEnum;

/// One check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Step {
    /// The CUDA kernels compile, without spills and within their registers; what is built afterwards has them
    Kernels,
    /// Formatting of the sources
    Fmt,
    /// The server and the clients of the tests are installed
    Setup,
    /// Clippy without warnings
    Clippy,
    /// The API documentation builds without warnings, and its examples compile
    Doc,
    /// Licences, sources and bans of the dependencies; `cargo xtask advisories` checks the rest
    Deny,
    /// The book builds, and no link in the documentation is broken
    Book,
    /// All programs and tests of the workspace compile
    Build,
    /// The library and the programs compile as they ship
    Release,
    /// The parsers of files and requests, for a few seconds on inputs that libFuzzer derives from the committed ones
    Fuzz,
    /// The tests of a room notice changes of its code: one shard, which the commit chooses
    Mutants,
    /// The share of lines that tests run, of some rooms
    Coverage,
    /// Whole models on fixtures: on each instruction set, on several ranks, and on the stand-in for a GPU
    Models,
    /// Unit and integration tests
    Unit,
    /// The backend in a fake server: tests that wait most of their time
    Driver,
    /// The book, and the pages drawn by commands, in a real browser
    Pages,
    /// The backend in a real tritonserver, with real clients; beside other steps, one half of the files
    Server,
    /// The other half
    OtherServer,
    /// The backend in a real tritonserver on the stand-in for a GPU, and on several ranks
    Gpus,
    /// Tests of packages, of installation, and of the library as it ships
    Shipped,
    /// Tests under the compilers' sanitizers
    Sanitize,
    /// Ten minutes of load from good and bad clients
    Soak,
}
