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
    /// Sums over several GPUs, if there are several
    AllReduce,
    /// Throughput through a tritonserver
    Throughput,
    /// The same in FP8
    Fp8,
}

impl Stage {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::Machine,
        Self::Kernels,
        Self::Models,
        Self::Server,
        Self::Steps,
        Self::Operations,
        Self::AllReduce,
        Self::Throughput,
        Self::Fp8,
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
            Self::AllReduce => "all-reduce",
            Self::Throughput => "throughput",
            Self::Fp8 => "fp8",
        }
    }

    /// The most seconds that it may take of the default 480. On a GPU most of them are for measurements, and on a
    /// stand-in, where these are quick, for tests.
    pub const fn seconds(self, is_quick: bool) -> u64 {
        let (on_gpu, quick) = match self {
            Self::Machine => (20, 10),
            Self::Kernels => (70, 100),
            Self::Models => (100, 250),
            Self::Server => (40, 80),
            Self::Steps => (110, 20),
            Self::Operations => (40, 20),
            Self::AllReduce => (15, 20),
            Self::Throughput => (120, 40),
            Self::Fp8 => (100, 40),
        };
        if is_quick { quick } else { on_gpu }
    }
}
