//! The parts of the check, in order.

/// A part of the check, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Stage {
    /// The GPU, its bandwidth and its peak
    Machine,
    /// Every kernel against its reference
    Kernels,
    /// Whole models against the CPU
    Models,
    /// Models inside a tritonserver
    Server,
    /// Generation steps and first tokens of the measured model
    Steps,
    /// Operations of the measured model
    Operations,
    /// Throughput through a tritonserver
    Throughput,
}

impl Stage {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Machine,
        Self::Kernels,
        Self::Models,
        Self::Server,
        Self::Steps,
        Self::Operations,
        Self::Throughput,
    ];

    /// Its name in the report, and as an argument.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Machine => "machine",
            Self::Kernels => "kernels",
            Self::Models => "models",
            Self::Server => "server",
            Self::Steps => "steps",
            Self::Operations => "operations",
            Self::Throughput => "throughput",
        }
    }

    /// The most seconds that it may take of the default 480.
    pub const fn seconds(self) -> u64 {
        match self {
            Self::Machine => 20,
            Self::Kernels => 70,
            Self::Models => 40,
            Self::Server => 40,
            Self::Steps => 120,
            Self::Operations => 40,
            Self::Throughput => 200,
        }
    }
}
