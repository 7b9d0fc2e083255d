"""Worked examples of commands, memory, schedules, the web, work of several steps, and of talk that needs no tool."""

from __future__ import annotations

from .example import Example, Step, note, plan, run, use

WORK: tuple[Example, ...] = (
    # commands
    run("run echo good night", "echo good night", "good night", "It printed: good night"),
    run("execute bell.py and tell me the output", "python3 bell.py", "ding dong", "The output is: ding dong"),
    run("run the script hi.sh", "sh hi.sh", "hey", "It printed: hey"),
    run("start hello.py, what does it print?", "python3 hello.py", "ahoy", "It prints: ahoy"),
    run("run stats.sh and tell me the result", "sh stats.sh", "total 31", "The result is: total 31"),
    run("what time is it?", "date '+%H:%M'", "14:26", "It is 14:26."),
    run("use a command to print the current year", "date +%Y", "2031", "It is 2031."),
    run("which day of the week was 1999-03-02? use date", "date -d 1999-03-02 +%A", "Tuesday", "It was a Tuesday."),
    run(
        "what date is 30 days after 2031-01-05? use the shell",
        "date -d '2031-01-05 +30 days' +%F",
        "2031-02-04",
        "It is 2031-02-04.",
    ),
    run("sort rivers.txt into sorted.txt", "sort rivers.txt > sorted.txt", "", "sorted.txt has the sorted lines."),
    run(
        "save the lines of rivers.txt in reverse to back.txt",
        "tac rivers.txt > back.txt",
        "",
        "back.txt has them in reverse.",
    ),
    run(
        "keep only the unique lines of pets.txt in once.txt",
        "sort -u pets.txt > once.txt",
        "",
        "once.txt has each line once.",
    ),
    run(
        "write the first 2 lines of rivers.txt to top.txt",
        "head -n 2 rivers.txt > top.txt",
        "",
        "top.txt has the first 2 lines.",
    ),
    run(
        "convert rivers.txt to upper case and save it as big.txt",
        "tr a-z A-Z < rivers.txt > big.txt",
        "",
        "big.txt is in upper case.",
    ),
    run("add up the numbers 1 to 40 in the shell", "seq 40 | awk '{s+=$1} END {print s}'", "820", "The sum is 820."),
    run("calculate 17*23 with python", "python3 -c 'print(17*23)'", "391", "It is 391."),
    run("run ls -l | wc -l and tell me what it prints", "ls -l | wc -l", "8", "It prints 8."),
    run(
        "print the last 3 lines of boot.log with tail", "tail -n 3 boot.log", "a\nb\nc", "The last lines are: a, b, c."
    ),
    run("Führe den Befehl uname aus", "uname", "Linux", "Die Ausgabe ist: Linux"),
    run("ejecuta el comando uname", "uname", "Linux", "La salida es: Linux"),
    run("uname 명령을 실행해줘", "uname", "Linux", "결과는 Linux입니다."),
    run("运行命令 uname", "uname", "Linux", "输出是 Linux。"),
    # what should be known later
    note("remember that my sister is called Nora", "The user's sister is called Nora.", "I will remember that."),
    note("keep in mind: the wifi code is blue77", "The wifi code is blue77.", "I noted it."),
    note("don't forget that I park on level 3", "The user parks on level 3.", "I will not forget it."),
    note("just so you know: I work at night", "The user works at night.", "Good to know, I noted it."),
    note("for next time: my doctor is Dr. Kent", "The user's doctor is Dr. Kent.", "I noted it."),
    note("note for the future: I prefer short answers", "The user prefers short answers.", "Noted."),
    note("Merk dir, dass mein Hund Balu heißt", "Der Hund des Nutzers heißt Balu.", "Das merke ich mir."),
    note("Recuerda que vivo en Murcia", "El usuario vive en Murcia.", "Lo recordaré."),
    note("내 고양이 이름은 나비야. 기억해 줘", "사용자의 고양이 이름은 나비이다.", "기억하겠습니다."),
    note("记住我的生日是五月三日", "用户的生日是五月三日。", "我记住了。"),
    # what was said before
    use(
        "what did I tell you about my boat last time?",
        "memory_search",
        "user: my boat is called Heron",
        "You said that your boat is called Heron.",
        query="boat",
    ),
    use(
        "do you remember which tea I like? I mentioned it before",
        "memory_search",
        "user: I like mint tea",
        "You like mint tea.",
        query="tea",
    ),
    use(
        "search our past conversations: when does Nora arrive?",
        "memory_search",
        "user: Nora arrives on 2 May",
        "Nora arrives on 2 May.",
        query="Nora arrive",
    ),
    use(
        "go through what we said in the past: where do I keep the key?",
        "memory_search",
        "user: I keep the key under the blue pot",
        "You keep the key under the blue pot.",
        query="key",
    ),
    use(
        "what was the wifi code again? I gave it to you",
        "memory_search",
        "user: the wifi code is blue77",
        "The wifi code is blue77.",
        query="wifi code",
    ),
    use(
        "what is the name of my boss? I told you last week",
        "memory_search",
        "user: my boss is called Jonas",
        "Your boss is called Jonas.",
        query="boss",
    ),
    use(
        "which colour did I say I want for the door?",
        "memory_search",
        "user: I want a green door",
        "You want a green door.",
        query="door colour",
    ),
    use(
        "Weißt du noch, wie mein Hund heißt? Ich habe es dir erzählt.",
        "memory_search",
        "user: mein Hund heißt Balu",
        "Dein Hund heißt Balu.",
        query="Hund heißt",
    ),
    use(
        "¿te acuerdas de dónde vivo? te lo dije antes",
        "memory_search",
        "user: vivo en Murcia",
        "Vives en Murcia.",
        query="vivo",
    ),
    use(
        "전에 말한 내 고양이 이름이 뭐였지?",
        "memory_search",
        "user: 고양이 이름은 나비",
        "나비입니다.",
        query="고양이 이름",
    ),
    use("我以前说过我的生日是哪天?", "memory_search", "user: 我的生日是五月三日", "是五月三日。", query="生日"),
    # what should happen at a time
    plan(
        "remind me in 20 minutes to turn off the oven",
        "I will remind you in 20 minutes.",
        message="Remind the user to turn off the oven.",
        at="in 20 minutes",
    ),
    plan("wake me tomorrow at 6:45", "I will wake you tomorrow at 6:45.", message="Wake the user.", at="tomorrow 6:45"),
    plan(
        "reminder at 17:00 today: call the bank",
        "I will remind you at 17:00.",
        message="Remind the user to call the bank.",
        at="today 17:00",
    ),
    plan(
        "on 2031-06-01 at 10:00 remind me of the exam",
        "I will remind you then.",
        message="Remind the user of the exam.",
        at="2031-06-01T10:00",
    ),
    plan(
        "tell me to blink every 15 minutes", "I will, every 15 minutes.", message="Tell the user to blink.", every="15m"
    ),
    plan(
        "every 2 hours ask me how I feel",
        "I will ask every 2 hours.",
        message="Ask the user how they feel.",
        every="2h",
    ),
    plan(
        "every morning at 8:30 remind me to water the ferns",
        "I will remind you every day at 8:30.",
        message="Remind the user to water the ferns.",
        cron="30 8 * * *",
    ),
    plan(
        "each day at 21:05 tell me to lock the door",
        "I will, every day at 21:05.",
        message="Tell the user to lock the door.",
        cron="5 21 * * *",
    ),
    plan(
        "every friday at 16:00 remind me of the time sheet",
        "I will remind you every Friday at 16:00.",
        message="Remind the user of the time sheet.",
        cron="0 16 * * 5",
    ),
    plan(
        "on weekdays at 9 remind me of the meeting",
        "I will remind you on weekdays at 9.",
        message="Remind the user of the meeting.",
        cron="0 9 * * 1-5",
    ),
    use(
        "which reminders are set?",
        "cron",
        "7c2e: once, Sunday 17:00; to cli:direct: Remind the user to call the bank.",
        "One: to call the bank on Sunday at 17:00.",
        action="list",
    ),
    use("show my scheduled jobs", "cron", "(nothing is scheduled)", "Nothing is scheduled.", action="list"),
    Example(
        "delete the reminder about the bank",
        (
            Step(
                "cron", {"action": "list"}, "7c2e: once, Sunday 17:00; to cli:direct: Remind the user to call the bank."
            ),
            Step("cron", {"action": "remove", "id": "7c2e"}, "Removed job 7c2e."),
        ),
        "I removed the reminder about the bank.",
    ),
    use("cancel the reminder 7c2e", "cron", "Removed job 7c2e.", "I cancelled it.", action="remove", id="7c2e"),
    plan(
        "Erinnere mich in 10 Minuten an den Tee",
        "Ich erinnere dich in 10 Minuten.",
        message="Den Nutzer an den Tee erinnern.",
        at="in 10 minutes",
    ),
    plan(
        "Erinnere mich jeden Tag um 8:30 an die Tablette",
        "Ich erinnere dich jeden Tag um 8:30.",
        message="Den Nutzer an die Tablette erinnern.",
        cron="30 8 * * *",
    ),
    plan(
        "Erinnere mich jeden Freitag um 16 Uhr an den Bericht",
        "Ich erinnere dich jeden Freitag um 16 Uhr.",
        message="Den Nutzer an den Bericht erinnern.",
        cron="0 16 * * 5",
    ),
    plan(
        "Recuérdame en 2 horas llamar a Rita",
        "Te lo recordaré en 2 horas.",
        message="Recordar al usuario que llame a Rita.",
        at="in 2 hours",
    ),
    plan(
        "30분 뒤에 빨래하라고 알려줘",
        "30분 뒤에 알려드리겠습니다.",
        message="사용자에게 빨래하라고 알려 준다.",
        at="in 30 minutes",
    ),
    plan("15 分钟后提醒我喝水", "15 分钟后提醒你。", message="提醒用户喝水。", at="in 15 minutes"),
    # the web
    use(
        "search the web for the height of Ben Nevis",
        "web_search",
        "Ben Nevis: 1345 m (example.org/nevis)",
        "Ben Nevis is 1345 m high.",
        query="height of Ben Nevis",
    ),
    use(
        "look up online who won the race yesterday",
        "web_search",
        "Kim won the race (example.org/race)",
        "Kim won the race.",
        query="who won the race yesterday",
    ),
    use(
        "what does https://example.org/tea say?",
        "web_fetch",
        "# Tea\nTea needs hot water.",
        "It says that tea needs hot water.",
        url="https://example.org/tea",
    ),
    # more than one step
    Example(
        "write plus.py that prints 40+2, then run it",
        (
            Step("write_file", {"path": "plus.py", "content": "print(40 + 2)\n"}, "Created plus.py."),
            Step("exec", {"command": "python3 plus.py"}, "42"),
        ),
        "plus.py printed 42.",
    ),
    Example(
        "find out where the speed is set and change it to 80",
        (
            Step("grep", {"pattern": "speed"}, "car/motor.ini:3:speed = 60"),
            Step(
                "edit_file",
                {"path": "car/motor.ini", "old_text": "speed = 60", "new_text": "speed = 80"},
                "Edited car/motor.ini in line 3.",
            ),
        ),
        "The speed in car/motor.ini is 80 now.",
    ),
    Example(
        "take the second river from rivers.txt and write it to pick.txt",
        (
            Step("read_file", {"path": "rivers.txt"}, "Rhine\nDanube\nElbe"),
            Step("write_file", {"path": "pick.txt", "content": "Danube\n"}, "Created pick.txt."),
        ),
        "pick.txt says Danube.",
    ),
    Example(
        "make a folder notes2 and move lake.txt into it",
        (Step("exec", {"command": "mkdir -p notes2 && mv lake.txt notes2/"}, "(no output)"),),
        "lake.txt is in notes2 now.",
    ),
)
